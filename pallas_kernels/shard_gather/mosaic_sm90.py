"""One layer's shards, read from the other devices' memory by the tensor memory accelerator (TMA).

What is gathered does not change while a step runs. So nobody has to send, and nobody waits for anybody: a device reads
its peers' memory over NVLink when it needs a layer, however far the others are. Thread blocks take tiles of all arrays
in turn: of each device's shard the same tile, several such groups in flight through shared memory.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels import compat

#: Bytes of a tile's row; a layer's shard is a whole number of these.
ROW_BYTES = 256
#: Of a group of tiles, one of each device: 16 to 32 KiB.
_GROUP_ROWS = 128
#: Groups in flight; 160 KiB of shared memory.
_STAGES = 5


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("axis_name", "cores"))
def gather(stacks: Sequence[Array], layer: Int[Array, ""], *, axis_name: str, cores: int) -> list[Array]:
    """As `api.gather`.

    Args:
        stacks: of one dtype, rows of `ROW_BYTES` a layer.
        layer: index.
        axis_name: of the mesh axis.
        cores: thread blocks.
    """
    count = lax.axis_size(axis_name)
    width = ROW_BYTES // stacks[0].dtype.itemsize
    views = [stack.reshape(len(stack), -1, width) for stack in stacks]
    sizes = [view.shape[1] for view in views]
    rows = max(_GROUP_ROWS // count, 8)
    tiles = [pl.cdiv(size, min(rows, size)) for size in sizes]
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiles=tiles, axis_name=axis_name),
        out_type=[jax.ShapeDtypeStruct((count, size, width), stacks[0].dtype) for size in sizes],
        grid=(min(cores, sum(tiles)),),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((_STAGES, count, rows, width), stacks[0].dtype),
            plgpu.Barrier(num_arrivals=count, num_barriers=_STAGES),
        ],
        compiler_params=compat.reading_peers(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="shard_gather",
    )
    whole = kernel(jnp.reshape(layer, 1), *views)
    return [found.reshape(count * stack.shape[1], *stack.shape[2:]) for found, stack in zip(whole, stacks, strict=True)]


def _kernel(layer_ref, *refs, tiles: Sequence[int], axis_name: str):
    *refs, buffer, arrived = refs
    sources, results = refs[: len(tiles)], refs[len(tiles) :]
    layer, block, blocks = layer_ref[0], lax.axis_index("block"), lax.axis_size("block")
    count, device = lax.axis_size(axis_name), lax.axis_index(axis_name)
    total = sum(tiles)
    own = (total - block + blocks - 1) // blocks

    def of_tile(step, body) -> None:
        """`body(source, result, rows)` of the array that a step's tile belongs to."""
        tile, start = block + step * blocks, 0
        for source, result, number in zip(sources, results, tiles, strict=True):

            @pl.when((tile >= start) & (tile < start + number))
            def _(source=source, result=result, start=start):
                # The last tile is moved back to end with the array: it repeats what its neighbour writes.
                rows = min(buffer.shape[2], source.shape[1])
                first = lax.min((tile - start) * rows, jnp.int32(source.shape[1] - rows))
                body(source, result, pl.ds(first, rows))

            start += number

    def fetch(step) -> None:
        def copies(source, _, part) -> None:
            slot = lax.rem(step, _STAGES)
            for ahead in range(count):
                peer = lax.rem(device + ahead, jnp.int32(count))
                there = source if ahead == 0 else compat.peer_ref(source, axis_name, peer)
                here = buffer.at[slot, ahead, pl.ds(0, part.size)]
                plgpu.copy_gmem_to_smem(there.at[layer, part], here, arrived.at[slot])

        pl.when(step < own)(lambda: of_tile(step, copies))

    for step in range(_STAGES - 1):
        fetch(jnp.int32(step))

    def turn(step, _) -> None:
        slot = lax.rem(step, _STAGES)
        plgpu.barrier_wait(arrived.at[slot])

        def put(_, result, part) -> None:
            for ahead in range(count):
                place = lax.rem(device + ahead, jnp.int32(count))
                here = buffer.at[slot, ahead, pl.ds(0, part.size)]
                plgpu.copy_smem_to_gmem(here, result.at[place, part], commit_group=False)
            plgpu.commit_smem_to_gmem_group()

        of_tile(step, put)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the step before: its slot is free
        fetch(step + _STAGES - 1)

    lax.fori_loop(0, own, turn, None)
    plgpu.wait_smem_to_gmem(0)


def whole_rows(shape: Sequence[int], itemsize: int) -> bool:
    """Whether a layer's shard is a whole number of rows.

    Args:
        shape: of the stack.
        itemsize: bytes of an element.
    """
    return math.prod(shape[1:]) * itemsize % ROW_BYTES == 0
