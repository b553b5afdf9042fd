"""Mosaic kernels for Hopper GPUs: passes over the rows that have an expert, and over no others.

Up to eight thread blocks of one warpgroup a multiprocessor loop over tiles of rows. A tile of 64 columns at a time is
loaded into registers, 16 bytes a thread; nothing goes through shared memory, and the sums over a row stay in registers
until its last columns. XLA hands these kernels the layer's rows where they lie in the stack that the loop keeps.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import compat, dispatch

#: Of a tile.
ROWS, COLUMNS = 32, 64
#: Thread blocks a multiprocessor.
_BLOCKS = 8
#: Neighbouring lanes have 16 bytes of a row after another, eight of them the tile's columns; a warp has four rows.
_TILING = plgpu.Tiling(((16, COLUMNS), (4, COLUMNS), (8,)))
_TILE = plgpu.Layout.TILED(_TILING, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


@functools.partial(jax.jit, static_argnames=("interpret",))
def forward(gate_up: Float[Array, "M 2F"], rows: Int[Array, ""], *, interpret: Any = None) -> Float[Array, "M F"]:
    """silu(gate) · up of the first rows.

    Args:
        gate_up: bfloat16 or float16; at least `ROWS` rows, F a multiple of `COLUMNS`.
        rows: how many; those behind them, up to a whole tile, are read and written too, the others neither.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    count, width = gate_up.shape
    out = jax.ShapeDtypeStruct((count, width // 2), gate_up.dtype)
    [h] = _call(_forward, "routed_glu", rows, [gate_up], [out], interpret)
    return h


@functools.partial(jax.jit, static_argnames=("interpret",))
def gradients(
    gate_up: Float[Array, "M 2F"],
    dh: Float[Array, "M F"],
    weights: Float[Array, " M"],
    rows: Int[Array, ""],
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "M F"], Float[Array, "M 2F"], Float[Array, " M"]]:
    """`api.gradients` of the first rows.

    Args:
        gate_up: as for `forward`.
        dh: of its dtype.
        weights: float32.
        rows: as for `forward`.
        interpret: as for `forward`.
    """
    outs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (dh, gate_up, weights)]
    h, dgate_up, dweights = _call(_gradients, "routed_glu_gradients", rows, [gate_up, dh, weights], outs, interpret)
    return h, dgate_up, dweights


def _call(body: Callable[..., None], name: str, rows: Array, operands: list[Array], outs: list[Any], interpret: Any):
    blocks = min(_BLOCKS * dispatch.num_cores(), pl.cdiv(outs[0].shape[0], ROWS))
    kernel = plgpu.kernel(
        functools.partial(_kernel, body=body, inputs=len(operands), blocks=blocks, interpreted=interpret is not None),
        out_type=outs,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # nothing here is both read and written
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name=name,
        interpret=interpret,
    )
    return kernel(jnp.reshape(rows, 1).astype(jnp.int32), *operands)


def _kernel(rows_ref, *refs, body: Callable[..., None], inputs: int, blocks: int, interpreted: bool):
    count = refs[0].shape[0]
    tiles = lax.div(lax.min(rows_ref[0], jnp.int32(count)) + ROWS - 1, jnp.int32(ROWS))
    block = lax.axis_index("block")

    def load(ref: Any, *where: Any) -> Array:
        there = ref.at[where]
        layout = _TILE if len(where) == 2 else _TILE.reduce(1)
        value = there[...] if interpreted else compat.mosaic_load(there, layout)
        return value.astype(jnp.float32)

    def tile(value: Array) -> Array:
        """A number, or one of each row, in all places of a tile."""
        value = lax.broadcast_in_dim(value, (ROWS, COLUMNS), tuple(range(value.ndim)))
        return value if interpreted else plgpu.layout_cast(value, _TILE)

    @pl.loop(0, lax.div(tiles - block + blocks - 1, jnp.int32(blocks)))
    def _(turn):
        # The last tile of all is moved back to end with the array: it repeats what its neighbour writes.
        first = lax.min((turn * blocks + block) * ROWS, jnp.int32(count - ROWS))
        body(refs[:inputs], refs[inputs:], pl.ds(first, ROWS), load, tile)


def _forward(operands: Any, results: Any, rows: Any, load: Any, tile: Any) -> None:
    (gate_up,), (h,) = operands, results
    width = h.shape[1]

    @pl.loop(0, width, step=COLUMNS)
    def _(start):
        gate, up = (load(gate_up, rows, pl.ds(start + part, COLUMNS)) for part in (0, width))
        h[rows, pl.ds(start, COLUMNS)] = (gate * _sigmoid(gate) * up).astype(h.dtype)


def _gradients(operands: Any, results: Any, rows: Any, load: Any, tile: Any) -> None:
    (gate_up, dh, weights), (h, dgate_up, dweights) = operands, results
    width, weight = h.shape[1], tile(load(weights, rows))

    def columns_of(number: Any, total: Array) -> Array:
        start = number * COLUMNS
        columns = pl.ds(start, COLUMNS)
        gate, up = (load(gate_up, rows, pl.ds(start + part, COLUMNS)) for part in (0, width))
        back = load(dh, rows, columns)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        product = silu * up
        h[rows, columns] = product.astype(h.dtype)
        total += back * product
        back *= weight
        dgate_up[rows, columns] = (back * up * (sigmoid + silu * (1 - sigmoid))).astype(dgate_up.dtype)
        dgate_up[rows, pl.ds(width + start, COLUMNS)] = (back * silu).astype(dgate_up.dtype)
        return total

    dweights[rows] = jnp.sum(lax.fori_loop(0, width // COLUMNS, columns_of, tile(jnp.float32(0))), axis=1)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))
