"""One token a row after others, as generation has it: the state is read twice and written once."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.gated_delta.chunks import wide


def one_token(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, scale: float
) -> tuple[Array, Array]:
    """The output and the state after the token; arguments as in ``api.gated_delta``, of one token.

    Both products with the state are of S before the token, so that one pass makes them: with γ S + k uᵀ after it the
    output is γ Sᵀq + u (k·q).
    """
    (batch, _, heads, size), key_heads, precise = v.shape, k.shape[2], wide(v.dtype)
    q, k = (array[:, 0].astype(precise)[:, :, None, :, None] for array in (q, k))  # [B, K, 1, D, 1]
    kept, written, v = (
        array[:, 0].astype(precise).reshape(batch, key_heads, heads // key_heads, 1, -1)
        for array in (jnp.exp(decay.astype(precise)), beta, v)
    )
    before = state.reshape(batch, key_heads, heads // key_heads, *state.shape[2:])
    seen, read = (kept * jnp.sum(array * before, axis=3, keepdims=True) for array in (k, q))
    new = written * (v - seen)
    out = scale * (read + jnp.sum(k * q, axis=3, keepdims=True) * new)
    return out.reshape(batch, 1, heads, size).astype(v.dtype), (kept * before + k * new).reshape(state.shape)
