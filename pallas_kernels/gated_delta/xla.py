"""The rule by chunks in jax.numpy, with a backward pass written by hand; arguments as in `api.REGISTRY`.

Products are of the inputs' dtype and summed in float32 (float64 inputs: all in float64). The backward pass makes the
states before the chunks again; of the forward pass it has `inner` alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.gated_delta.chunks import CHUNK, Chunks, factors, sums_before, wide


class _Tokens(NamedTuple):
    """The tokens of chunks; leaves lead with [B, N] outside a scan over the chunks.

    G are the value heads of a key head, C the tokens of a chunk.
    """

    q: Array  # [..., K, C, D]
    k: Array  # [..., K, C, D]
    v: Array  # [..., K, G, C, Dv]
    beta: Array  # [..., K, G, C], as all that follow
    entering: Array  # factor of what the state before the chunk gives to a token
    leaving: Array  # factor of what a token gives to the state after the chunk
    passing: Array  # [..., K, G]: factor of the state
    pairs: Array  # [..., K, G, C, C]: factors L of pairs of tokens


def forward(q: Array, k: Array, v: Array, chunks: Chunks, state: Array, scale: float) -> tuple[Array, Array, Array]:
    """The output [B, S, H, Dv], the state after the last token, and `inner` [B, S, H, C]."""
    tokens = _tokens(q, k, v, chunks)
    inner = _inner(_triangle(tokens)).astype(v.dtype)

    def chunk(state: Array, inputs: tuple[_Tokens, Array]) -> tuple[Array, Array]:
        one, inner = inputs
        new = _new(one, inner, state)
        out = one.entering[..., None] * _product("bkcd,bkgdv->bkgcv", one.q, state.astype(v.dtype))
        scores = (one.pairs * _product("bkcd,bked->bkce", one.q, one.k)[:, :, None]).astype(v.dtype)
        out = out + _product("bkgce,bkgev->bkgcv", scores, new.astype(v.dtype))
        return _after(one, new, state), scale * out

    state, out = lax.scan(chunk, _by_key_head(state, k), _leading((tokens, inner)))
    inner = jnp.moveaxis(inner, 4, 2).reshape(*v.shape[:3], CHUNK)
    return _joined(out, v), state.reshape(state.shape[0], v.shape[2], *state.shape[3:]), inner


def backward(
    q: Array,
    k: Array,
    v: Array,
    chunks: Chunks,
    state: Array,
    inner: Array,
    dout: Array,
    dstate: Array,
    scale: float,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """The gradients of q, k, v, of decay and beta [B, H, S], and of the state."""
    tokens = _tokens(q, k, v, chunks)
    douts = _split(dout, k.shape[2])
    inner = _split(inner, k.shape[2])

    def again(state: Array, inputs: tuple[_Tokens, Array]) -> tuple[Array, Array]:
        return _after(inputs[0], _new(*inputs, state), state), state

    _, states = lax.scan(again, _by_key_head(state, k), _leading((tokens, inner)))

    def chunk(dstate: Array, inputs: Any) -> tuple[Array, Any]:
        one, inner, dout, state = inputs
        return _chunk_backward(one, inner, dout, state, dstate, scale)

    dstate, gradients = lax.scan(
        chunk, _by_key_head(dstate, k), (*_leading((tokens, inner, douts)), states), reverse=True
    )
    dq, dk, dv, ddecay, dbeta = gradients
    dq, dk = (jnp.moveaxis(array, (0, 3), (1, 2)).reshape(q.shape).astype(q.dtype) for array in (dq, dk))
    ddecay, dbeta = (jnp.moveaxis(array, 0, 3).reshape(chunks.beta.shape) for array in (ddecay, dbeta))
    return dq, dk, _joined(dv, v), ddecay, dbeta, dstate.reshape(state.shape)


def _chunk_backward(
    one: _Tokens, inner: Array, dout: Array, state: Array, dstate: Array, scale: float
) -> tuple[Array, tuple[Array, ...]]:
    dtype = one.k.dtype
    state_, dstate_ = state.astype(dtype), dstate.astype(dtype)
    new = _new(one, inner, state)
    new_ = new.astype(dtype)
    products, keys = (_product("bkcd,bked->bkce", array, one.k)[:, :, None] for array in (one.q, one.k))
    scores = (one.pairs * products).astype(dtype)
    # What flows to the new values, through the triangular system to the corrections, and on to the state.
    dnew = scale * _product("bkgce,bkgcv->bkgev", scores, dout)
    dnew = dnew + one.leaving[..., None] * _product("bkcd,bkgdv->bkgcv", one.k, dstate_)
    dright = dnew + _product("bkgce,bkgcv->bkgev", inner, dnew.astype(dtype))
    dright_ = dright.astype(dtype)
    dseen = -(one.beta * one.entering)[..., None] * dright
    dread = scale * one.entering[..., None] * dout.astype(state.dtype)
    before = one.passing[..., None, None] * dstate
    before = before + _product("bkcd,bkgcv->bkgdv", one.q, dread.astype(dtype))
    before = before + _product("bkcd,bkgcv->bkgdv", one.k, dseen.astype(dtype))
    # Of each token, by where it stands in the sums.
    from_state = scale * one.entering[..., None] * _product("bkgcv,bkgdv->bkgcd", dout, state_)
    corrected = -one.entering[..., None] * _product("bkgcv,bkgdv->bkgcd", dright_, state_)
    to_state = one.leaving[..., None] * _product("bkgcv,bkgdv->bkgcd", new_, dstate_)
    dscores = scale * one.pairs * _product("bkgcv,bkgev->bkgce", dout, new_)
    dtriangle = -_below(one.pairs * _product("bkgcv,bkgev->bkgce", dright_, new_))
    system = one.beta[..., None] * dtriangle
    both = (system + jnp.swapaxes(system, -1, -2)).astype(dtype)
    dscores_ = dscores.astype(dtype)
    dq = jnp.sum(from_state + _product("bkgce,bked->bkgcd", dscores_, one.k), axis=2)
    dk = to_state + one.beta[..., None] * corrected + _product("bkgce,bked->bkgcd", both, one.k)
    dk = jnp.sum(dk + _product("bkgce,bkcd->bkged", dscores_, one.q), axis=2)
    wide_q, wide_k = (array.astype(state.dtype)[:, :, None] for array in (one.q, one.k))
    seen, left = jnp.sum(corrected * wide_k, axis=-1), jnp.sum(to_state * wide_k, axis=-1)
    dbeta = jnp.sum(dright * one.v.astype(state.dtype), axis=-1) + seen + jnp.sum(dtriangle * keys, axis=-1)
    # A decay is in every sum that goes over its token: those of pairs around it, from the chunk's start, to its end.
    pairs = _product("te,bkgec->bkgtc", _from(state.dtype), dscores * products + system * keys)
    ddecay = (
        jnp.sum(_below(pairs), axis=-1) + one.passing[..., None] * jnp.sum(state * dstate, axis=(-1, -2))[..., None]
    )
    ddecay = ddecay + _product(
        "te,bkge->bkgt", _from(state.dtype), jnp.sum(from_state * wide_q, axis=-1) + one.beta * seen
    )
    ddecay = ddecay + sums_before(left)
    return before, (dq, dk, one.beta[..., None] * dright, ddecay, dbeta)


def _tokens(q: Array, k: Array, v: Array, chunks: Chunks) -> _Tokens:
    heads = k.shape[2]
    q, k = (jnp.swapaxes(_cut(array), 2, 3) for array in (q, k))
    batch, count = k.shape[:2]

    def by_head(array: Array) -> Array:  # [B, H, S] -> [B, N, K, G, C]
        return jnp.moveaxis(array.reshape(batch, heads, array.shape[1] // heads, count, CHUNK), 3, 1)

    def of_chunks(array: Array) -> Array:  # [B, H, N, ...] -> [B, N, K, G, ...]
        split = array.reshape(batch, heads, array.shape[1] // heads, *array.shape[2:])
        return jnp.moveaxis(split, 3, 1)

    entering, leaving, passing = (of_chunks(array) for array in factors(chunks))
    decay, beta = by_head(chunks.decay), by_head(chunks.beta)
    documents = chunks.documents.reshape(batch, count, 1, 1, CHUNK)
    # Sums of the decays between two tokens, not differences of sums, which would be of fewer digits.
    between = _product(
        "te,bnkgtc->bnkgec", _from(decay.dtype), _below(jnp.broadcast_to(decay[..., None], (*decay.shape, CHUNK)))
    )
    place = jnp.arange(CHUNK)
    seen = (place[:, None] >= place[None])[None, None, None, None] & (documents[..., None] == documents[..., None, :])
    pairs = jnp.where(seen, jnp.exp(between), 0)
    return _Tokens(q, k, _split(v, heads), beta, entering, leaving, passing, pairs)


def _triangle(tokens: _Tokens) -> Array:
    """The strictly lower part of the system, in the dtype of the sums."""
    keys = _product("bnkcd,bnked->bnkce", tokens.k, tokens.k)[:, :, :, None]
    return _below(tokens.beta[..., None] * tokens.pairs * keys)


def _below(pairs: Array) -> Array:
    """Pairs [..., C, C] strictly below the diagonal, and zeros."""
    below = jnp.tril(jnp.ones((CHUNK, CHUNK), bool), -1)
    return jnp.where(below.reshape((1,) * (pairs.ndim - 2) + below.shape), pairs, 0)


def _from(dtype: DTypeLike) -> Array:
    """[C, C]: 1 where the second token is the first or comes after it."""
    return jnp.triu(jnp.ones((CHUNK, CHUNK), dtype))


def _inner(triangle: Array) -> Array:
    """(I + triangle)⁻¹ - I: inverses of blocks of twice the size from those of their halves, as substitution does."""
    place = jnp.arange(CHUNK)
    inverse = jnp.broadcast_to(jnp.eye(CHUNK, dtype=triangle.dtype), triangle.shape)
    size = 1
    while size < CHUNK:
        block = place // size
        below = (block[:, None] % 2 == 1) & (block[:, None] == block[None] + 1)
        part = jnp.where(below.reshape((1,) * (triangle.ndim - 2) + below.shape), triangle, 0)
        inverse = inverse - jnp.matmul(jnp.matmul(inverse, part, precision="highest"), inverse, precision="highest")
        size *= 2
    return _below(inverse)


def _new(one: _Tokens, inner: Array, state: Array) -> Array:
    """The new values of a chunk."""
    dtype = one.k.dtype
    seen = one.entering[..., None] * _product("bkcd,bkgdv->bkgcv", one.k, state.astype(dtype))
    right = one.beta[..., None] * (one.v.astype(state.dtype) - seen)
    return right + _product("bkgce,bkgev->bkgcv", inner, right.astype(dtype))


def _after(one: _Tokens, new: Array, state: Array) -> Array:
    """The state after a chunk."""
    given = (one.leaving[..., None] * new).astype(one.k.dtype)
    return one.passing[..., None, None] * state + _product("bkcd,bkgcv->bkgdv", one.k, given)


def _product(axes: str, left: Array, right: Array) -> Array:
    return jnp.einsum(axes, left, right, precision="highest", preferred_element_type=wide(left.dtype))


def _cut(array: Array) -> Array:
    """[B, S, ...] -> [B, N, C, ...]."""
    return array.reshape(array.shape[0], array.shape[1] // CHUNK, CHUNK, *array.shape[2:])


def _split(array: Array, key_heads: int) -> Array:
    """[B, S, H, ...] -> [B, N, K, G, C, ...]."""
    batch, length, heads, *rest = array.shape
    return jnp.moveaxis(array.reshape(batch, length // CHUNK, CHUNK, key_heads, heads // key_heads, *rest), 2, 4)


def _joined(array: Array, like: Array) -> Array:
    """[N, B, K, G, C, Dv] -> [B, S, H, Dv], in the dtype of `like`."""
    return jnp.moveaxis(array, (0, 4), (1, 2)).reshape(like.shape).astype(like.dtype)


def _by_key_head(state: Array, k: Array) -> Array:
    heads, key_heads = state.shape[1], k.shape[2]
    return state.reshape(state.shape[0], key_heads, heads // key_heads, *state.shape[2:])


def _leading(tree: Any) -> Any:
    """Leaves [B, N, ...] with the chunks first, as a scan takes them."""
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tree)
