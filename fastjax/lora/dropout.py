"""Dropout of the adapters' input."""

import functools
import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def drop(x: Float[Array, "B S E"], key: PRNGKeyArray | None, name: str, rate: float) -> Float[Array, "B S E"]:
    """Inverted dropout of an adapter's input; `x` itself where there is none.

    Args:
        x: input.
        key: of the layer; None switches dropout off (evaluation, generation).
        name: of the projection: every adapter of a layer has a mask of its own.
        rate: probability of a zero.
    """
    if key is None or rate == 0.0:
        return x
    return _dropped(name, rate, x, key)  # pyright: ignore[reportReturnType]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dropped(name: str, rate: float, x: Array, key: PRNGKeyArray):
    mask = jax.random.bernoulli(jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF), 1.0 - rate, x.shape)
    return jnp.where(mask, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros_like(x))


# A mask and a factor: its transpose is itself, with the mask drawn again instead of kept.
_dropped.defvjp(
    lambda name, rate, x, key: (_dropped(name, rate, x, key), key),
    lambda name, rate, key, dy: (_dropped(name, rate, dy, key), None),
)
