"""Queries, keys and values out of one product for XLA, on every device; arguments as in `api`."""

import math

import jax.numpy as jnp
from jax import Array

from pallas_kernels.rope import api as rope


def forward(
    qkv: Array, tables: tuple[Array, Array] | None, scales: Array | None, heads: tuple[int, int], interleaved: bool
) -> tuple[Array, Array, Array]:
    """Slices of the product; queries and keys turned, queries scaled."""
    count, key_count = heads
    size = qkv.shape[-1] // (count + 2 * key_count)
    parts = jnp.split(qkv, [count * size, (count + key_count) * size], axis=-1)
    q, k, v = (part.reshape(*qkv.shape[:2], part.shape[2] // size, size) for part in parts)
    if tables is not None:
        q, k = (rope.turn(part, *tables, interleaved) for part in (q, k))
    return q if scales is None else q * _factors(scales, q), k, v


def backward(
    gradients: tuple[Array, Array, Array],
    tables: tuple[Array, Array] | None,
    scales: Array | None,
    interleaved: bool,
    with_absmax: bool = False,
) -> tuple[Array, Array | None]:
    """The gradients turned back, side by side; the largest magnitude for each token."""
    dq, dk, dv = gradients
    dq = dq if scales is None else dq * _factors(scales, dq)
    if tables is not None:
        dq, dk = (rope.transpose(part, *tables, interleaved) for part in (dq, dk))
    gradient = jnp.concatenate(
        [part.reshape(*part.shape[:2], math.prod(part.shape[2:])) for part in (dq, dk, dv)], axis=-1
    )
    return gradient, jnp.max(jnp.abs(gradient), axis=-1).astype(jnp.float32) if with_absmax else None


def _factors(scales: Array, like: Array) -> Array:
    return scales.astype(like.dtype)[:, :, None, None]
