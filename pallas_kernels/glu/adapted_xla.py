"""`adapted` in plain jax.numpy, for every device; arguments and results are described there."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.glu.reference import ACTIVATIONS


def forward(both: Array, inner, down_A: Array | None, activation: str) -> tuple[Array, Array | None]:
    """`adapted.adapted_forward` without its checks."""
    gate, up = _halves(both, inner)
    h = (ACTIVATIONS[activation](gate) * up).astype(both.dtype)
    return h, None if down_A is None else _dot(h, down_A, ((1,), (1,)))


def backward(both: Array, inner, dh: Array, down_A: Array | None, dthin: Array | None, activation: str):
    """`adapted.adapted_backward` without its checks."""
    gate, up = _halves(both, inner)
    dh = dh.astype(jnp.float32)
    if down_A is not None and dthin is not None:
        dh = dh + _dot(dthin, down_A, ((1,), (0,))).astype(jnp.float32)
    activated, pullback = jax.vjp(ACTIVATIONS[activation], gate)
    (dgate,) = pullback(dh * up)
    dboth = jnp.concatenate([dgate, dh * activated], axis=1).astype(both.dtype)
    dB = dA = None
    if inner is not None:
        features, rank = inner.lora_B.shape[1:]
        products = _dot(dboth, inner.thin, ((0,), (0,)), jnp.float32)
        dB = jnp.stack([products[:features, :rank], products[features:, -rank:]])
    if dthin is not None:
        h = (activated * up).astype(both.dtype)
        dA = _dot(dthin, h, ((0,), (0,)), jnp.float32)
    return dboth, dB, dA


def _halves(both: Array, inner) -> tuple[Array, Array]:
    """Gate and up with what their adapters add, float32."""
    if inner is not None:
        rank = inner.lora_B.shape[-1]
        thins = inner.thin[:, :rank], inner.thin[:, -rank:]
        parts = [_dot(thin, b, ((1,), (1,))) for thin, b in zip(thins, inner.lora_B, strict=True)]
        both = both.astype(jnp.float32) + jnp.concatenate(parts, axis=1).astype(jnp.float32)
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=1)
    return gate, up


def _dot(x: Array, y: Array, contract, dtype=None) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=dtype)
