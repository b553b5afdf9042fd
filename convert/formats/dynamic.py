"""The dynamic 8-bit maps (arXiv 1511.04561): the signed one quantises NF4's scales, both quantise optimizer states.

Encoding NF4's scales follows its CPU kernel to the bit: values are scaled by their block's largest magnitude, rounded
to an even grid of 65,536 points and replaced by the code nearest to the grid point. (Its CUDA kernel searches for the
nearest code itself; about one code in a thousand differs, by one step.)
"""

import functools
import math

import numpy as np
from jaxtyping import Float, UInt8

NESTED_BLOCK = 256


@functools.cache
def dynamic_map(signed: bool = True) -> Float[np.ndarray, " 256"]:
    """A dynamic 8-bit map: seven decades, each with twice the points of the one below, and 0 and 1.

    Args:
        signed: Points on both sides of 0; else twice as many in each decade above it.

    Returns:
        float32 [256], rising; bit-equal to bitsandbytes' ``create_dynamic_map(signed)``.

    References:
        Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, arXiv 1511.04561.
    """
    values = [0.0, 1.0]
    start, end = np.float32(0.1), np.float32(1.0)
    for decade in range(7):
        steps = 2**decade if signed else 2 ** (decade + 1)
        step = np.float64((end - start) / np.float32(steps))
        index = np.arange(steps + 1)
        # torch.linspace: from the left end in the first half, from the right end in the second, fused multiply-add.
        points = np.where(index < (steps + 1) // 2, start + step * index, end - step * (steps - index))
        points = points.astype(np.float32)
        means = np.float32(10.0 ** (decade - 6)) * ((points[:-1] + points[1:]) / np.float32(2))
        values += [*means.tolist(), *(-means if signed else means[:0]).tolist()]
    result = np.array(sorted(values), np.float32)
    result.flags.writeable = False
    return result


def encode_dynamic(values: Float[np.ndarray, " n"]) -> tuple[UInt8[np.ndarray, " n"], Float[np.ndarray, " nested"]]:
    """Quantise in blocks of 256.

    Args:
        values: float32 [n].

    Returns:
        Codes, uint8 [n], and the blocks' largest magnitudes, float32 [ceil(n / 256)]; a block of zeros gets code 0.
    """
    padded = np.zeros(math.ceil(values.size / NESTED_BLOCK) * NESTED_BLOCK, np.float32)
    padded[: values.size] = values
    table = padded.reshape(-1, NESTED_BLOCK)
    absmax = np.abs(table).max(axis=1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # in a block of zeros 0 · (1 / 0) is NaN
        scaled = np.clip(table * (np.float32(1) / absmax)[:, None], np.float32(-1), np.float32(1))
    grid = ((scaled + np.float32(1)) * np.float32(0.5)) * np.float32(65535) + np.float32(0.5)
    codes = _nearest_on_grid()[np.where(np.isnan(grid), np.float32(0), grid).astype(np.int32)]
    return codes.reshape(-1)[: values.size], absmax


@functools.cache
def _nearest_on_grid() -> np.ndarray:
    """uint8 [65536]: the code nearest to each point of an even grid over [-1, 1]."""
    points = (np.arange(65536) / 65535 * 2 - 1).astype(np.float32)
    values = dynamic_map()
    return np.searchsorted((values[:-1] + values[1:]) / np.float32(2), points, side="left").astype(np.uint8)
