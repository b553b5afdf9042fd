"""Products over groups on Hopper, for operands of any size: they are padded to whole tiles."""

import functools

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.dispatch import num_cores
from pallas_kernels.grouped_matmul.config import TERMS, dw_config, matmul_config
from pallas_kernels.grouped_matmul.mosaic_sm90.dw import dw as dw_of_tiles
from pallas_kernels.grouped_matmul.mosaic_sm90.matmul import matmul as matmul_of_tiles
from pallas_kernels.grouped_matmul.schedule import ALIGNED


def matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    rows: Array | None,
    low_rank: tuple[Array, Array] | None,
    *,
    transposed: bool = False,
) -> Array:
    """y_i = w[g(i)] x_i + b[g(i)] z_i."""
    count, columns = (x if rows is None else rows).shape[0], w.shape[2 if transposed else 1]
    x, w = _padded(x, (1 if rows is not None else ALIGNED, TERMS)), _padded(w, (1, TERMS, TERMS))
    if low_rank is not None:
        low_rank = (_padded(low_rank[0], (ALIGNED, TERMS)), _padded(low_rank[1], (1, TERMS, TERMS)))
    rows = None if rows is None else _padded(rows, (ALIGNED,))
    config = matmul_config(columns, count / w.shape[0])
    out = matmul_of_tiles(x, w, group_sizes, rows, low_rank, transposed=transposed, config=config, cores=num_cores())
    return out[:count, :columns]


#: dx_i = dy_i w[g(i)] + z_i a[g(i)].
dx = functools.partial(matmul, transposed=True)


def dw(dy: Array, x: Array, group_sizes: Array, rows: Array | None, dtype: DTypeLike) -> Array:
    """dw[g] = Σ dy_i x_iᵀ over the rows of the group."""
    if x.shape[1] <= TERMS < dy.shape[1] and rows is None:  # the thin one takes a thin tile; turning it costs little
        return dw(x, dy, group_sizes, None, dtype).swapaxes(1, 2)
    shape = (dy.shape[1], x.shape[1])
    dy, x = _padded(dy, (ALIGNED, TERMS)), _padded(x, (1 if rows is not None else ALIGNED, TERMS))
    config = dw_config(dy.shape[1], jnp.dtype(dtype).itemsize)
    rows = None if rows is None else _padded(rows, (ALIGNED,))
    out = dw_of_tiles(dy, x, group_sizes, rows, dtype=dtype, config=config, cores=num_cores())
    return out[:, : shape[0], : shape[1]]


def _padded(array: Array, multiples: tuple[int, ...]) -> Array:
    """Zeros behind every axis, up to a multiple."""
    missing = [(0, -size % multiple) for size, multiple in zip(array.shape, multiples, strict=True)]
    return jnp.pad(array, missing) if any(after for _, after in missing) else array
