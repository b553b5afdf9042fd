"""Rows cut into chunks, as all implementations have them.

The recurrence over the tokens of a chunk is a triangular system (the WY form of arXiv 2406.06484 with the decays of
2412.06464). Of a value head, with G the decays' sums from the chunk's first token on, keys K, values V, the state S
before the chunk and L[i, j] = exp(G_i - G_j) for tokens j <= i of one document, else 0:

    inner   = (I + strictly lower part of β_i L[i, j] K_i·K_j)⁻¹ - I, strictly lower itself
    right   = β (V - exp(G) K S)                  values that correct what the state before the chunk says
    new     = right + inner right                 what the chunk's earlier tokens said is corrected too
    out     = scale · (exp(G) Q S + (L ∘ Q Kᵀ) new)
    S after = exp(G_last) S + Kᵀ (exp(G_last - G) new)

The identity is kept out of the products: in 16 bits they would round `right` itself.

S has a part in a token only if the token's document is that of the token before the chunk, and a token in the state
after it only if its document is the last one's.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

#: Tokens of a chunk.
CHUNK = 64


class Chunks(NamedTuple):
    """Gates and documents of every token, in chunks of C tokens.

    Attributes:
        decay: float32 [B, H, S].
        beta: float32 [B, H, S].
        documents: int32 [B, S].
        before: int32 [B, N], the document of the token before each chunk.
    """

    decay: Array
    beta: Array
    documents: Array
    before: Array


def wide(dtype: DTypeLike) -> DTypeLike:
    """The dtype of states and sums over inputs of a dtype."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


class Factors(NamedTuple):
    """Factors of what passes between a token and the states around its chunk.

    Attributes:
        entering: [B, H, N, C], of what the state before the chunk gives to a token.
        leaving: [B, H, N, C], of what a token gives to the state after it.
        passing: [B, H, N], of the state.
    """

    entering: Array
    leaving: Array
    passing: Array


def factors(chunks: Chunks, chunk: int = CHUNK) -> Factors:
    """The factors of whole rows, from sums of decays that are no differences of sums."""
    batch, heads, length = chunks.decay.shape
    decay = chunks.decay.reshape(batch, heads, length // chunk, chunk)
    documents = chunks.documents.reshape(batch, 1, length // chunk, chunk)
    entering = jnp.where(documents == chunks.before[:, None, :, None], jnp.exp(jnp.cumsum(decay, axis=-1)), 0)
    leaving = jnp.where(documents == documents[..., -1:], jnp.exp(sums_before(decay[..., ::-1])[..., ::-1]), 0)
    return Factors(entering, leaving, entering[..., -1])


def sums_before(array: Array) -> Array:
    """The sum of those before each one, along the last axis."""
    return jnp.cumsum(jnp.pad(array, ((0, 0),) * (array.ndim - 1) + ((1, 0),))[..., :-1], axis=-1)


def padded(arrays: tuple[Array, ...], chunk: int = CHUNK) -> tuple[Array, ...]:
    """Arrays [B, S, ...] with zeros up to whole chunks: such tokens leave the state as it is.

    Args:
        arrays: of the tokens.
        chunk: tokens of a chunk.
    """
    more = -arrays[0].shape[1] % chunk
    if not more:
        return arrays
    return tuple(jnp.pad(array, ((0, 0), (0, more)) + ((0, 0),) * (array.ndim - 2)) for array in arrays)


def chunks_of(decay: Array, beta: Array, segment_ids: Array | None, chunk: int = CHUNK) -> Chunks:
    """The chunks of whole rows.

    Args:
        decay: [B, S, H], of whole chunks.
        beta: of the same shape.
        segment_ids: [B, S] or less; tokens behind its end belong to the last document. None: a row is one.
        chunk: tokens of a chunk.
    """
    batch, length, _ = decay.shape
    if segment_ids is None:
        documents = jnp.zeros((batch, length), jnp.int32)
    else:
        documents = jnp.pad(segment_ids, ((0, 0), (0, length - segment_ids.shape[1])), mode="edge").astype(jnp.int32)
    before = jnp.concatenate([documents[:, :1], documents[:, chunk - 1 : -1 : chunk]], axis=1)
    return Chunks(jnp.moveaxis(decay, 1, 2), jnp.moveaxis(beta, 1, 2), documents, before)
