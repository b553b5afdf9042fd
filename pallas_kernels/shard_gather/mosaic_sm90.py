"""One layer's shards, read from the other devices' memory.

What is gathered does not change while a step runs. So nobody has to send, and nobody waits for anybody: a device reads
its peers' memory over NVLink when it needs a layer, however far the others are. Many small thread blocks of one
warpgroup, no shared memory: neighbouring ones copy from different devices, this one first, so that the link and the
memory work together. A form through shared memory (TMA) read at 357 GB/s, but each array of each device needs a
descriptor there, and LLVM takes long for the code on the host that makes them.
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
from jaxtyping import Array, Int

from pallas_kernels import compat

#: What a thread copies at once, and a warpgroup.
_VECTOR_BYTES = 16
LEAST_BYTES = 128 * _VECTOR_BYTES
#: Of a thread block, at most: four times as much.
_TILE_BYTES = 4 * LEAST_BYTES


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("axis_name", "interpret"))
def gather(stacks: Sequence[Array], layer: Int[Array, ""], *, axis_name: str, interpret: Any = None) -> list[Array]:
    """`api.gather` of stacks of one dtype.

    Args:
        stacks: of one dtype; of each layer `suits` bytes.
        layer: index.
        axis_name: of the mesh axis.
        interpret: parameters of Mosaic's interpreter, for which the stacks lead with an axis of the devices, and the
            last one gathers; None compiles.
    """
    interpreted, dtype = interpret is not None, stacks[0].dtype
    count = len(stacks[0]) if interpreted else lax.axis_size(axis_name)
    shards = [stack.shape[1 + interpreted :] for stack in stacks]  # of a layer and a device
    sizes = [math.prod(shard) for shard in shards]
    views = [stack.reshape(*stack.shape[: 1 + interpreted], -1) for stack in stacks]
    tiles = [count * pl.cdiv(size, _tile(size, dtype.itemsize)) for size in sizes]
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiles=tiles, axis_name=axis_name, interpreted=interpreted),
        out_type=[jax.ShapeDtypeStruct((count, size), dtype) for size in sizes],
        grid=(sum(tiles),),
        grid_names=("tile",),
        compiler_params=compat.reading_peers(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="shard_gather",
        interpret=interpret,
    )
    whole = kernel(jnp.reshape(layer, 1), *views)
    return [array.reshape(count * rows, *rest) for array, (rows, *rest) in zip(whole, shards, strict=True)]


def _kernel(layer_ref, *refs, tiles: Sequence[int], axis_name: str, interpreted: bool):
    sources, results = refs[: len(tiles)], refs[len(tiles) :]
    count = jnp.int32(results[0].shape[0] if interpreted else lax.axis_size(axis_name))
    device = count - 1 if interpreted else lax.axis_index(axis_name)
    tile, start = lax.axis_index("tile"), 0
    for source, result, number in zip(sources, results, tiles, strict=True):

        @pl.when((tile >= start) & (tile < start + number))
        def _(source=source, result=result, start=start):
            own = tile - start
            place = lax.rem(device + lax.rem(own, count), count)
            # The last tile is moved back to end with the array: it repeats what its neighbour writes.
            size, itemsize = result.shape[1], source.dtype.itemsize
            length = _tile(size, itemsize)
            part = pl.ds(lax.min(lax.div(own, count) * length, jnp.int32(size - length)), length)
            there = compat.peer_ref(source, axis_name, place, interpreted=interpreted).at[layer_ref[0], part]
            result[place, part] = there[...] if interpreted else compat.mosaic_load(there, in_vectors(itemsize))

        start += number


def _tile(size: int, itemsize: int) -> int:
    """Elements of a tile of an array: whole pieces of `LEAST_BYTES`."""
    return min(_TILE_BYTES, size * itemsize // LEAST_BYTES * LEAST_BYTES) // itemsize


def in_vectors(itemsize: int) -> Any:
    """The layout of a tile in registers: lanes, then warps have 16 bytes after another.

    Args:
        itemsize: bytes of an element.
    """
    vector = _VECTOR_BYTES // itemsize
    tiling = plgpu.Tiling(((128 * vector,), (32 * vector,), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def suits(shape: Sequence[int], itemsize: int) -> bool:
    """Whether a layer's shard has `LEAST_BYTES` or more, and whole pieces of 16.

    Args:
        shape: of the stack.
        itemsize: bytes of an element.
    """
    size = math.prod(shape[1:]) * itemsize
    return size >= LEAST_BYTES and size % _VECTOR_BYTES == 0
