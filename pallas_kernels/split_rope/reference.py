"""Queries, keys and values out of one product in plain jax.numpy: the oracle, its gradient's by differentiation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rope import reference


def split_rope(
    qkv: Float[Array, "B S N"],
    cos: Float[Array, "B S R//2"] | None,
    sin: Float[Array, "B S R//2"] | None,
    *,
    heads: int,
    key_heads: int,
    interleaved: bool = False,
    query_scales: Float[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B S H D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
    """Cut the product by head, turn queries and keys, scale queries; arguments as in ``api.split_rope``."""
    every = qkv.reshape(*qkv.shape[:2], heads + 2 * key_heads, -1)
    q, k, v = jnp.split(every, [heads, heads + key_heads], axis=2)
    if cos is not None and sin is not None:
        q, k = (reference.rope(part, cos, sin, interleaved=interleaved) for part in (q, k))
    if query_scales is not None:
        q = q * query_scales.astype(q.dtype)[:, :, None, None]
    return q, k, v
