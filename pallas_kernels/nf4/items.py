"""Products of rows with one of several packed matrices each: the experts that a few tokens have chosen."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.dispatch import HALF, lacks_dtype, num_cores, target
from pallas_kernels.nf4 import mosaic_sm90
from pallas_kernels.nf4.codebook import BLOCK
from pallas_kernels.nf4.config import LEAST_OUT, MATVEC_GRAIN, items_config


def why_not_items(dtype: DTypeLike, shape: tuple[int, int], order: str, own_map: bool) -> str | None:
    """Why `matmul_items` does not serve a call on the target, as a clause; None: it does.

    Args:
        dtype: of x.
        shape: (out, in) of a matrix.
        order: of the codes.
        own_map: whether the values are NF4's own.
    """
    if reason := target().lacks((9, 0), exactly=True) or lacks_dtype(dtype, HALF):
        return reason
    if order != "split" or not own_map:
        return "it decodes NF4's own values in the split order"
    if shape[0] < LEAST_OUT or shape[1] % MATVEC_GRAIN:
        return (
            f"it takes {LEAST_OUT} rows of multiples of {MATVEC_GRAIN} columns or more, this is {shape[0]}×{shape[1]}"
        )
    return None


def matmul_items(
    x: Float[Array, "N in"],
    codes: UInt8[Array, "X out in/2"],
    absmax: Float[Array, "X out in/64"],
    table: Int[Array, "I slots+1"],
    count: Int[Array, "1"],
    *,
    rows: int,
) -> Float[Array, "rows out"]:
    """The products y_p = W_x(p) x_p in the dtype of x, of which each matrix is read once for the rows of an item.

    The sixteen values are rounded to the dtype of x and scaled in float32, as in the product of a few rows with one
    matrix. Not differentiable. Where `why_not_items` is None.

    Args:
        x: bfloat16 or float16; row p of the result is of its row p // (rows // N).
        codes: in the split order.
        absmax: float32.
        table: int32; of each item a matrix and up to eight rows of the result, -1 in the place of none.
        count: int32; items in use, which come first.
        rows: of the result, a multiple of N. A row that is in no item is undefined.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    groups, out, columns = absmax.shape[0], absmax.shape[1], x.shape[1]
    wanted = {
        "codes": (codes, (groups, out, columns // 2), jnp.uint8),
        "absmax": (absmax, (groups, out, columns // BLOCK), jnp.float32),
        "table": (table, (table.shape[0], min(table.shape[1], 9)), jnp.int32),
        "count": (count, (1,), jnp.int32),
    }
    for name, (array, shape, dtype) in wanted.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"nf4.matmul_items: expected {name} {list(shape)} in {jnp.dtype(dtype).name} for x {list(x.shape)}, "
                f"given {list(array.shape)} in {array.dtype}"
            )
    if rows % len(x):
        raise ValueError(f"nf4.matmul_items: expected a multiple of the {len(x)} rows of x, given {rows} rows")
    cores = num_cores()
    sizes = items_config(table.shape[0], (out, columns), cores)
    return mosaic_sm90.matvec_items(x, codes, absmax, table, count, rows=rows, config=sizes, cores=cores)[0]
