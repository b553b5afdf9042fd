"""The recurrence token by token in plain jax.numpy: the oracle.

float64 inputs are computed in float64, others in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.chunks import wide


def gated_delta(
    q: Float[Array, "B S K D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S H Dv"],
    decay: Float[Array, "B S H"],
    beta: Float[Array, "B S H"],
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    state: Float[Array, "B H D Dv"] | None = None,
) -> tuple[Float[Array, "B S H Dv"], Float[Array, "B H D Dv"]]:
    """The output in v's dtype and the state after the last token; arguments as in ``api.gated_delta``."""
    precise = wide(v.dtype)
    (batch, length, heads, value_size), (key_heads, size) = v.shape, k.shape[2:]
    if state is None:
        state = jnp.zeros((batch, heads, size, value_size), precise)
    begins = jnp.zeros((batch, length), bool)
    if segment_ids is not None:
        begins = begins.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])

    def token(state, inputs):
        q, k, v, decay, beta, begins = inputs
        q, k = (jnp.repeat(array, heads // key_heads, axis=1) for array in (q, k))
        kept = jnp.where(begins[:, None], 0.0, jnp.exp(decay))
        state = state * kept[..., None, None]
        seen = jnp.einsum("bhd,bhdv->bhv", k, state, precision="highest")
        new = beta[..., None] * (v - seen)
        state = state + k[..., None] * new[..., None, :]
        return state, scale * jnp.einsum("bhd,bhdv->bhv", q, state, precision="highest")

    inputs = [jnp.moveaxis(array.astype(precise), 1, 0) for array in (q, k, v, decay, beta)]
    state, out = jax.lax.scan(token, state.astype(precise), (*inputs, begins.T))
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), state
