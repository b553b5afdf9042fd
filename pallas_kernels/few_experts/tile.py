"""Indices of tiles in Pallas-Triton, which has no slices: arrays, one for each axis of the reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def iota(count: int) -> Array:
    """0, 1, … count - 1; a power of two of them."""
    return jax.lax.iota(jnp.int32, count)


def over(*parts: Any) -> tuple[Array, ...]:
    """Arrays and numbers, each over the axes of all of them."""
    shape = jnp.broadcast_shapes(*(jnp.shape(part) for part in parts))
    return tuple(jnp.broadcast_to(part, shape) for part in parts)
