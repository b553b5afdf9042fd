"""Stages of shared memory that a loading warpgroup fills and the multiplying ones release."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_sm90 import rows as rows_at


def arrive(barriers, index, stages: int) -> None:
    """Arrive at the barrier of the stage with the piece `index`."""
    plgpu.barrier_arrive(barriers.at[lax.rem(index, jnp.int32(stages))])


def stay(free, count, stages: int) -> None:
    """Wait until every stage is released: a thread block's barriers must outlive its neighbour's last arrival on them.

    Args:
        free: barriers on which both thread blocks of a cluster release stages.
        count: pieces loaded in all.
        stages: pieces in shared memory at a time; so many releases have not been waited for yet.
    """

    def wait(index, _):
        plgpu.barrier_wait(free.at[lax.rem(index, jnp.int32(stages))])

    lax.fori_loop(lax.max(count - stages, 0), count, wait, None)


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
