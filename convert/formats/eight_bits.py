"""Eight bits a value, FP8 (E4M3) or integers, quantised by row, by block of rows and columns, or with one scale in all.

As compressed-tensors, but in float32 whatever the weight has. With G the values that share a scale:

- FP8: scale = round(max|G| / 448); code = E4M3(clip(w / scale, -448, 448)), half to even; value = code · scale
- int8: scale = round(max|G| / 127.5); code = rint(clip(w / scale, -128, 127)), half to even; value = code · scale

round is to the dtype of the scales (`convert.formats.scales.divided`).
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from convert.formats.scales import divided


class Codes(NamedTuple):
    """A dtype of codes.

    Attributes:
        dtype: int8 or float8_e4m3fn.
        steps: What the largest magnitude is divided by.
        lowest: The least code.
        highest: The largest.
    """

    dtype: np.dtype
    steps: float
    lowest: float
    highest: float


E4M3 = Codes(np.dtype(ml_dtypes.float8_e4m3fn), 448.0, -448.0, 448.0)
INT8 = Codes(np.dtype(np.int8), 127.5, -128.0, 127.0)


def largest_of(values: Float[np.ndarray, "rows columns"], block: tuple[int, int]) -> Float[np.ndarray, "high wide"]:
    """The largest magnitude of each block; the last ones may be smaller.

    Args:
        values: float32, from the first row of a block on.
        block: Rows and columns of a block.
    """
    rows, columns = values.shape
    by_rows = np.maximum.reduceat(np.abs(values), np.arange(0, rows, block[0]), axis=0)
    return np.maximum.reduceat(by_rows, np.arange(0, columns, block[1]), axis=1)


def encode(
    values: Float[np.ndarray, "rows columns"],
    largest: Float[np.ndarray, "high wide"],
    block: tuple[int, int],
    kind: Codes,
    dtype: np.dtype,
) -> tuple[Shaped[np.ndarray, "rows columns"], Shaped[np.ndarray, "high wide"]]:
    """Quantise rows.

    Args:
        values: Finite values, float32, from the first row of a block on.
        largest: The largest magnitude of each block: `largest_of`, or one of the whole matrix and those that are
            loaded as one with it.
        block: Rows and columns of a block.
        kind: Of the codes.
        dtype: Of the scales.

    Returns:
        Codes and scales; a scale is infinite where `dtype` cannot hold it.
    """
    scales = divided(largest, kind.steps, dtype)
    wide = np.repeat(np.repeat(scales, block[0], 0)[: len(values)], block[1], 1)[:, : values.shape[1]]
    scaled = np.clip(values / wide, np.float32(kind.lowest), np.float32(kind.highest))
    codes = (np.rint(scaled) if kind.dtype.kind == "i" else scaled).astype(kind.dtype)
    return codes, scales.astype(dtype)
