"""Mosaic kernels for Hopper GPUs: an all-gather and a reduce-scatter by loads from the other devices' memory.

XLA inserts a barrier over all devices before the kernel, so the operands are complete everywhere when it starts. Two
thread blocks a multiprocessor loop over the tiles; one warpgroup loads a tile of each device into registers, its own
first. At the end block i signals block i of every other device and waits for their signals: no device frees or
overwrites an operand that another one still reads. Blocks start in the order of their numbers, so the lowest one that
has not ended is resident on every device, and the waits end. Shares that are to travel in fewer bits than they have are
rounded by XLA before, those for the other devices alone.

Between two H200s NCCL reaches 160 to 210 GB/s at these sizes, these kernels 320; NCCL overlaps with products, and they
do not.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels import compat, dispatch
from pallas_kernels.shard_gather.mosaic_sm90 import LEAST_BYTES, in_vectors

#: Of a tile, at most: of up to four devices, whose tiles are in registers at once.
_TILE_BYTES = 4 * LEAST_BYTES
#: Thread blocks a multiprocessor: there is room for twice as many, beside NCCL's.
_BLOCKS = 2


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("axis_name", "axis", "interpret"))
def gather(x: Array, axis_name: str, axis: int, interpret: Any = None) -> Array:
    """`api.all_tokens`.

    Args:
        x: a device's own part.
        axis_name: of the mesh axis.
        axis: along which parts are joined.
        interpret: parameters of Mosaic's interpreter, for which x leads with an axis of the devices, and the last one
            gathers; None compiles.
    """
    interpreted = interpret is not None
    count, shape = (len(x), x.shape[1:]) if interpreted else (lax.axis_size(axis_name), x.shape)
    rows, size = math.prod(shape[:axis]), math.prod(shape[axis:])
    view = x.reshape(*x.shape[:interpreted], rows, size)
    out = jax.ShapeDtypeStruct((rows, count, size), x.dtype)
    whole = _exchange(_gather_tile, (view,), out, count, axis_name, interpret)
    return whole.reshape(*shape[:axis], count * shape[axis], *shape[axis + 1 :])


@functools.partial(jax.jit, static_argnames=("axis_name", "axis", "travel", "interpret"))
def scatter(x: Array, axis_name: str, axis: int, travel: DTypeLike, interpret: Any = None) -> Array:
    """`api.own_sums`.

    Args:
        x: a device's share of all sums.
        axis_name: of the mesh axis.
        axis: along which they are split.
        travel: dtype of the shares for other devices.
        interpret: as for `gather`.
    """
    interpreted = interpret is not None
    count, shape = (len(x), x.shape[1:]) if interpreted else (lax.axis_size(axis_name), x.shape)
    rows, size = math.prod(shape[:axis]), math.prod(shape[axis:]) // count
    view = x.reshape(*x.shape[:interpreted], rows, count, size)
    out = jax.ShapeDtypeStruct((rows, size), x.dtype)
    views = [view]
    if x.dtype != travel:
        away = functools.partial(_away, dtype=travel)
        views.append(jax.vmap(away)(view, jnp.arange(count)) if interpreted else away(view, lax.axis_index(axis_name)))
    sums = _exchange(_scatter_tile, views, out, count, axis_name, interpret)
    return sums.reshape(*shape[:axis], shape[axis] // count, *shape[axis + 1 :])


def _away(view: Array, device: Array, dtype: DTypeLike) -> Array:
    """A device's shares [rows, devices, size] for the devices behind it in order: [rows, devices - 1, size]."""
    count = view.shape[1]
    places = [lax.rem(device + step, count) for step in range(1, count)]
    shares = [lax.dynamic_index_in_dim(view, place, axis=1) for place in places]
    return jnp.concatenate(shares, axis=1).astype(dtype)


def _exchange(move: Any, views: Sequence[Array], out: Any, count: int, axis_name: str, interpret: Any) -> Array:
    """A kernel that moves each tile of each row once."""
    itemsize = min(view.dtype.itemsize for view in views)
    length = _tile(out.shape[-1], itemsize, count)
    tiles = out.shape[0] * (out.shape[-1] // length)
    blocks = min(_BLOCKS * dispatch.num_cores(), tiles)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            move=move,
            vectors=in_vectors(itemsize),
            sources=len(views),
            count=count,
            length=length,
            tiles=tiles,
            blocks=blocks,
            axis_name=axis_name,
            interpreted=interpret is not None,
        ),
        out_type=out,
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[] if interpret is not None else [plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=move.__name__.strip("_").replace("tile", "tokens"),
        interpret=interpret,
    )
    return kernel(*views)


def _kernel(
    *refs,
    move: Any,
    vectors: Any,
    sources: int,
    count: int,
    length: int,
    tiles: int,
    blocks: int,
    axis_name: str,
    interpreted: bool,
):
    out_ref, *done = refs[sources:]
    block, device = lax.axis_index("block"), jnp.int32(count - 1) if interpreted else lax.axis_index(axis_name)
    places = [lax.rem(device + step, jnp.int32(count)) for step in range(count)]
    parts = out_ref.shape[-1] // length

    def part_of(source: Any, place: Any, *where: Any) -> Array:
        """A tile of an argument as a device has it."""
        there = compat.peer_ref(source, axis_name, place, interpreted=interpreted).at[where]
        return there[...] if interpreted else compat.mosaic_load(there, vectors)

    @pl.loop(0, pl.cdiv(tiles, blocks))
    def _(turn):
        tile = turn * blocks + block

        @pl.when(tile < tiles)
        def _():
            row, start = lax.div(tile, jnp.int32(parts)), lax.rem(tile, jnp.int32(parts)) * length
            move(part_of, *refs[:sources], out_ref, places, row, pl.ds(start, length))

    for semaphore in done:  # until all devices have loaded what they need of this one's operands
        for place in places[1:]:
            device_id: Any = {axis_name: place}
            pl.semaphore_signal(semaphore, device_id=device_id)
        pl.semaphore_wait(semaphore, count - 1, decrement=False)


def _gather_tile(part_of: Any, x_ref: Any, out_ref: Any, places: Any, row: Any, part: Any) -> None:
    for place, tile in [(place, part_of(x_ref, place, row, part)) for place in places]:
        out_ref[row, place, part] = tile


def _scatter_tile(part_of: Any, x_ref: Any, *refs: Any) -> None:
    *away, out_ref, places, row, part = refs
    tiles = [part_of(x_ref, places[0], row, places[0], part)]
    for step, place in enumerate(places[1:], 1):
        if away:  # in those that a device has for the ones behind it, this one is as many from the end
            tiles.append(part_of(away[0], place, row, len(places) - 1 - step, part))
        else:
            tiles.append(part_of(x_ref, place, row, places[0], part))
    total, *others = (tile.astype(jnp.float32) for tile in tiles)
    for share in others:
        total += share
    out_ref[row, part] = total.astype(out_ref.dtype)


def _tile(size: int, itemsize: int, count: int) -> int:
    """Elements of a tile: the most that divide a part."""
    most = _TILE_BYTES if count <= 4 else _TILE_BYTES // 2
    return next(tile for tile in (most, most // 2, LEAST_BYTES) if size * itemsize % tile == 0) // itemsize


def suits(part: int, itemsize: int) -> bool:
    """Whether a device's part of a row has whole pieces of `LEAST_BYTES`.

    Args:
        part: its elements.
        itemsize: bytes of an element.
    """
    return part * itemsize % LEAST_BYTES == 0
