"""Shared parts of the forward and backward kernels: layouts, dropout, the soft cap, inputs and the launch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.attention import dropout
from pallas_kernels.attention.call import Mask, Options
from pallas_kernels.attention.ranges import TILE, order_of_all

LOG2E = math.log2(math.e)
MASKED = -1e30
"""The logit of a masked key; far below LOWEST, so that its weight is exactly 0 also in a row without a key so far."""
LOWEST = -1e20
"""Initial value of a row's running maximum: finite, so that no infinities are subtracted."""

WARPGROUP_ROWS = 64
SWIZZLED_ROWS = 8
"""The height of a swizzled tile."""
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def transforms(columns: int, rows: int = 64) -> tuple[Any, ...]:
    """The tiling and swizzle of a 16-bit shared-memory tile: the widest that divides its columns and its rows.

    A product with the tile's transpose sums over its columns, a product with the tile over its rows.
    """
    for swizzle in (128, 64, 32):
        if columns % (swizzle // 2) == 0 and rows % (swizzle // 2) == 0:
            return plgpu.TilingTransform((SWIZZLED_ROWS, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    raise NotImplementedError(f"a tile of {rows} × {columns} 16-bit elements: expected multiples of 16")


def kept(shape: tuple[int, ...], seed: Any, head: Array, first_row: Array, first_column: Array, options, transposed):
    """Dropout's mask, [rows, columns]."""

    def word(dimension, first):
        number = plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA) + first
        return number.astype(jnp.uint32)

    rows, columns = word(0, first_row), word(1, first_column)
    queries, keys = (columns, rows) if transposed else (rows, columns)
    bits = dropout.random_bits((seed[0], seed[1]), head.astype(jnp.uint32), queries, keys)
    return bits >= jnp.uint32(dropout.threshold(options.dropout_rate))


def broadcast_rows(rows: Array, shape: tuple[int, ...]) -> Array:
    """One number a row, in every column of `shape`."""
    return lax.broadcast_in_dim(rows, shape, [0])


def zeros(shape: tuple[int, ...]) -> Array:
    """An accumulator of 0, float32."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def full_rows(value: float) -> Array:
    """One number for each of a warpgroup's rows, float32."""
    return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), ROWS)


def padded_rows(ends: Array) -> Array:
    """Range ends [B, rows] with whole tiles of rows; the new rows are as empty as the ranges behind the last one."""
    return jnp.pad(ends, ((0, 0), (0, -ends.shape[1] % TILE)), mode="edge")


def broadcast_columns(columns: Array, shape: tuple[int, ...]) -> Array:
    """One number a column, in every row of `shape`."""
    return lax.broadcast_in_dim(columns, shape, [1])


def mask_inputs(mask: Mask, options: Options, rows: str) -> dict[str, Array | None]:
    """The mask's inputs of the kernels whose rows are queries ("q") or keys ("k")."""
    ranges, columns = mask.ranges, {"q": "k", "k": "q"}[rows]
    return {
        "start": None if ranges is None else padded_rows(getattr(ranges, f"{columns}_start")),
        "end": None if ranges is None else padded_rows(getattr(ranges, f"{columns}_end")),
        "order": None if ranges is None else order_of_all(getattr(ranges, f"{rows}_order")),
        "offset": mask.query_offset if options.query_offset is None else None,
    }


def launch(
    kernel: Any,
    inputs: dict[str, Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    ctas: int,
    name: str,
    interpret: Any,
) -> tuple[Array, ...]:
    """`mosaic.launch` on as many thread blocks of three warpgroups, at most one a multiprocessor."""
    return mosaic.launch(
        kernel,
        inputs,
        outputs,
        scratch,
        name=name,
        grid=("cta", ctas),
        threads=3,
        interpret=interpret,
        approx_math=True,
        unsafe_no_auto_barriers=False,
        reduction_scratch_bytes=0,  # sums over rows stay within a warp
    )


def accumulator(rows: int, columns: int) -> Any:
    """Accumulator registers of a product, float32."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def accumulator_from(array: Array) -> Any:
    """Accumulator registers that start from an array; for `pl.run_state`, which returns the sum."""
    return plgpu.ACC.init(array)  # pyright: ignore[reportPrivateImportUsage]
