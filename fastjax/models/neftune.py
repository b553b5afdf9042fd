"""Noise on the embeddings while training (NEFTune, Jain et al., arXiv 2310.05914)."""

import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def noisy_embeddings(
    x: Float[Array, "B S E"], segment_ids: Int[Array, "B S"] | None, key: PRNGKeyArray, alpha: float
) -> Float[Array, "B S E"]:
    """Embeddings with noise, uniform in ±alpha/√(L·E), L the tokens of the document.

    L is the length of each packed document, so that packing changes nothing; the paper and TRL take the row's length
    with its padding, the same for a row of one document.

    Args:
        x: embeddings.
        segment_ids: document of each token, 0 for padding, without noise; None: every row is one document.
        key: random state of the microbatch; equal keys give equal noise.
        alpha: the paper's α, 5 to 15.
    """
    batch, length, width = x.shape
    if segment_ids is None:
        tokens = jnp.full((batch, 1), length, jnp.float32)
    else:
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        counts = jnp.zeros((batch, length + 1), jnp.int32).at[rows, segment_ids].add(1)
        tokens = jnp.take_along_axis(counts, segment_ids, axis=1).astype(jnp.float32)
    bound = alpha / jnp.sqrt(tokens * width)
    if segment_ids is not None:
        bound = jnp.where(segment_ids == 0, 0.0, bound)
    noise_key = jax.random.fold_in(key, zlib.crc32(b"neftune") & 0x7FFFFFFF)
    noise = jax.random.uniform(noise_key, x.shape, jnp.float32, -1.0, 1.0)
    return x + (noise * bound[:, :, None]).astype(x.dtype)
