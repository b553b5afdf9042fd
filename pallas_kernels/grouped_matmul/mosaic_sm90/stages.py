"""The warpgroups' roles, and the stages of shared memory that one fills and the multiplying ones release."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.config import MatmulConfig
from pallas_kernels.grouped_matmul.mosaic_sm90 import rows as rows_at
from pallas_kernels.mosaic import stay

#: Multiplying warpgroups, and rows of the sums of each.
CONSUMERS, UNIT = 2, 64
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 56


def arrive(barriers, index, stages: int) -> None:
    """Arrive at the barrier of the stage with the piece `index`."""
    plgpu.barrier_arrive(barriers.at[lax.rem(index, jnp.int32(stages))])


def announce(full, count, stages: int) -> None:
    """Tell the multiplying warpgroups of the oldest gathered piece that they do not know of, when it is there.

    Comes before the loading warpgroup waits for the stage of piece `count`. That stage is released when the piece after
    its last one has come, `count - stages + 1`: the very one that is announced here. One piece later, and both would
    wait forever.

    Args:
        full: barriers of the stages.
        count: pieces asked for so far, each its own set of copies (`rows.gather_commit`).
        stages: pieces in shared memory at a time.
    """
    delay = stages - 1

    @pl.when(count >= delay)
    def _():
        rows_at.gather_wait(delay - 1)
        # The barrier in it is passed when the copies of all threads are done; the fence shows them to the tensor cores.
        plgpu.commit_smem()
        arrive(full, count - delay, stages)


def announce_rest(full, count, stages: int) -> None:
    """`announce` the pieces left at the end."""
    rows_at.gather_wait(0)
    plgpu.commit_smem()
    for back in range(stages - 1, 0, -1):
        pl.when(count >= back)(lambda back=back: arrive(full, count - back, stages))


def run_warpgroups(refs, warpgroup, turns, compute, load, config: MatmulConfig) -> None:
    """Take a thread block's tiles in turn: two warpgroups multiply, the last one loads.

    Args:
        refs: the kernel's references.
        warpgroup: this one's number.
        turns: tiles of the thread block.
        compute: (turn, pieces taken) -> pieces taken now, of a multiplying warpgroup.
        load: (turn, pieces asked for) -> pieces asked for now.
        config: block sizes.
    """

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        lax.fori_loop(0, turns, compute, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)  # shared memory must outlive the last tile's stores

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        count = lax.fori_loop(0, turns, load, jnp.int32(0))
        if refs.rows is not None:
            announce_rest(refs.x_full, count, config.stages)
        if config.cluster > 1:
            stay(refs.free, count, config.stages)


def sums_of(refs, other_full, count, pieces, multiply, config: MatmulConfig):
    """A multiplying warpgroup's sums of a tile, float32 [UNIT, config.columns].

    Args:
        refs: the kernel's references.
        other_full: barriers of the second operand's stages.
        count: pieces taken so far.
        pieces: of the tile.
        multiply: (sums, index of the piece, its stage) issues the product with a piece.
        config: block sizes.
    """

    def products(sums_ref):
        def step(index, _):
            slot = lax.rem(count + index, jnp.int32(config.stages))
            plgpu.barrier_wait(refs.x_full.at[slot])
            plgpu.barrier_wait(other_full.at[slot])
            multiply(sums_ref, index, slot)
            # One product stays in flight; the one before is done, and its stage is released.
            plgpu.wgmma_wait(1)
            pl.when(index > 0)(lambda: arrive(refs.free, count + index - 1, config.stages))

        lax.fori_loop(0, pieces, step, None)
        sums = sums_ref[...]  # waits for the product in flight
        pl.when(pieces > 0)(lambda: arrive(refs.free, count + pieces - 1, config.stages))
        return sums

    accumulator = plgpu.ACC((UNIT, config.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(products, accumulator)
