"""Stages of shared memory that a loading warpgroup fills and the multiplying ones release."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


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
