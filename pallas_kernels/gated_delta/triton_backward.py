"""The backward pass of the rule in Pallas-Triton; arguments as in `api.REGISTRY`.

The states before the chunks are made again, then a walk back makes their gradients and those of the corrections
(`right` in the formulas of `chunks`), and last every chunk's own gradients are made from both.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.gated_delta.chunks import CHUNK, Chunks
from pallas_kernels.gated_delta.triton import (
    Gates,
    along,
    below,
    columns_of,
    dot,
    gates_of,
    grid,
    pair_factors,
    prepare,
    steps,
    walk,
)


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
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """The gradients of q, k, v, of decay and beta [B, H, S], and of the state."""
    return _backward(q, k, v, chunks, state, inner, dout, dstate, scale, columns_of(v), interpret)


@functools.partial(jax.jit, static_argnums=(8, 9, 10))
def _backward(q, k, v, chunks: Chunks, state, inner, dout, dstate, scale: float, width: int, interpret: bool):
    (scores,) = prepare(q, k, v, chunks, interpret, inner=False)
    gates, like = gates_of(chunks), jax.ShapeDtypeStruct
    count = chunks.before.shape[1]
    held = like((v.shape[0], count, *state.shape[1:]), v.dtype)
    run = functools.partial(walk, grid=grid(v, width), interpret=interpret)
    states, new = run(
        functools.partial(along, scale=scale, width=width),
        (None, k, v, inner, None, *gates, state),
        (held, like(v.shape, v.dtype)),
        name="gated_delta_states",
    )
    betas = like((v.shape[3] // width, *chunks.beta.shape), jnp.float32)
    dstates, dright, dv, dbeta, dfirst = run(
        functools.partial(_back, scale=scale, width=width),
        (q, k, v, dout, inner, scores, *gates, dstate),
        (held, like(v.shape, v.dtype), like(v.shape, v.dtype), betas, like(state.shape, jnp.float32)),
        name="gated_delta_states_backward",
    )
    dq, dk, ddecay, rest = _of_chunks(q, k, chunks, gates, (dout, new, dright, states, dstates), scale, interpret)
    return dq, dk, dv, ddecay, jnp.sum(dbeta, axis=0) + rest, dfirst


def _back(q_ref, k_ref, v_ref, dout_ref, inner_ref, scores_ref, *refs, scale: float, width: int):
    """From chunk to chunk, the last first: gradients of states after chunks, corrections, values and, in part, beta."""
    gates, (dstate_ref, *out_refs) = Gates(*refs[: len(Gates._fields)]), refs[len(Gates._fields) :]
    dstates_ref, dright_ref, dv_ref, dbeta_ref, dfirst_ref = out_refs
    at = steps(gates, width)
    head, row, columns = at.head, at.row, at.columns
    key_head, part = head // (v_ref.shape[2] // k_ref.shape[2]), pl.program_id(0)

    def loaded(index):
        number = at.begin + jnp.maximum(at.count - 1 - index, 0)
        rows = pl.ds(number * CHUNK, CHUNK)
        gated = (pltriton.load(ref.at[row, head, rows]) for ref in gates[:3])
        return pltriton.load(v_ref.at[row, rows, head, columns]), *gated, gates.passing[row, head, number]

    def chunk(index, carry):
        dstate, (v, *gated, passing) = carry
        beta, entering, leaving = (array[:, None] for array in gated)
        following = loaded(index + 1)
        number = at.begin + at.count - 1 - index
        rows = pl.ds(number * CHUNK, CHUNK)
        q, k = (pltriton.load(ref.at[row, rows, key_head, :]) for ref in (q_ref, k_ref))
        dout = pltriton.load(dout_ref.at[row, rows, head, columns])
        inner, scores = (pltriton.load(ref.at[row, rows, head, :]) for ref in (inner_ref, scores_ref))
        own = at.own(number, pltriton.load(gates.documents.at[row, rows]), gates.before[row, number])
        held = dstate.astype(k.dtype)

        @pl.when(number < at.end)
        def _():
            dstates_ref[row, number, head, :, columns] = held

        dnew = scale * dot(scores, dout, trans_a=True) + leaving * dot(k, held)
        dright = dnew + dot(inner, dnew.astype(k.dtype), trans_a=True)
        of_beta = jnp.sum(dright * v.astype(jnp.float32), axis=1)
        pltriton.store(dbeta_ref.at[part, row, head, rows], of_beta, mask=own)
        pltriton.store(dright_ref.at[row, rows, head, columns], dright.astype(k.dtype), mask=own[:, None])
        pltriton.store(dv_ref.at[row, rows, head, columns], (beta * dright).astype(k.dtype), mask=own[:, None])
        dread = (scale * entering * dout.astype(jnp.float32)).astype(k.dtype)
        dseen = (-beta * entering * dright).astype(k.dtype)
        return passing * dstate + dot(q, dread, trans_a=True) + dot(k, dseen, trans_a=True), following

    dstate = jnp.where(at.last, dstate_ref[row, head, :, columns], 0.0)
    dstate, _ = lax.fori_loop(jnp.int32(0), at.count, chunk, (dstate, loaded(0)))

    @pl.when(at.first)
    def _():
        dfirst_ref[row, head, :, columns] = dstate


def _of_chunks(q, k, chunks: Chunks, gates: Gates, given: tuple[Array, ...], scale: float, interpret: bool):
    """The gradients of q, k and decay and the rest of beta's, from gradients of the output, new values, gradients of
    the corrections, states before the chunks, and gradients of those after them.
    """
    dout, new, dright, states, dstates = given
    (batch, length, heads, _), (key_heads, size), like = new.shape, k.shape[2:], jax.ShapeDtypeStruct
    sums = jnp.cumsum(chunks.decay.reshape(batch, heads, -1, CHUNK), axis=-1).reshape(batch, heads, length)
    per_token, square = like((batch, heads, length), jnp.float32), like((*new.shape[:3], CHUNK), new.dtype)
    call = functools.partial(
        pl.pallas_call,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )
    dscores, dsystem, *of_pairs = call(
        functools.partial(_pairs_backward, scale=scale),
        out_shape=(square,) * 2 + (per_token,) * 2,
        grid=(length // CHUNK, heads, batch),
        name="gated_delta_pairs_backward",
    )(q, k, dout, new, dright, sums, chunks.beta, chunks.documents, gates.passing, states, dstates)
    parts = size // CHUNK
    per_part = like((parts, *per_token.shape), jnp.float32)
    dq, dk, *of_states = call(
        functools.partial(_keys_backward, groups=heads // key_heads, scale=scale),
        out_shape=(like(q.shape, q.dtype), like(k.shape, k.dtype), per_part, per_part),
        grid=(length // CHUNK, key_heads * parts, batch),
        name="gated_delta_keys_backward",
    )(q, k, dout, new, dright, dscores, dsystem, states, dstates, *gates[:3])
    dsums, dbeta = (one + jnp.sum(other, axis=0) for one, other in zip(of_pairs, of_states, strict=True))
    by_chunk = dsums.reshape(batch, heads, length // CHUNK, CHUNK)
    return dq, dk, lax.cumsum(by_chunk, axis=3, reverse=True).reshape(dsums.shape), dbeta


def _pairs_backward(
    q_ref,
    k_ref,
    dout_ref,
    new_ref,
    dright_ref,
    sums_ref,
    beta_ref,
    documents_ref,
    passing_ref,
    states_ref,
    dstates_ref,
    dscores_ref,
    dsystem_ref,
    dsums_ref,
    dbeta_ref,
    *,
    scale: float,
):
    """Gradients of pairs of tokens, of a value head in a chunk."""
    number, head, row = (pl.program_id(axis) for axis in range(3))
    rows, key_head = pl.ds(number * CHUNK, CHUNK), head // (new_ref.shape[2] // k_ref.shape[2])
    beta = pltriton.load(beta_ref.at[row, head, rows])
    dout, new, dright = (pltriton.load(ref.at[row, rows, head, :]) for ref in (dout_ref, new_ref, dright_ref))
    q, k = (pltriton.load(ref.at[row, rows, key_head, :]) for ref in (q_ref, k_ref))
    pairs = pair_factors(pltriton.load(sums_ref.at[row, head, rows]), pltriton.load(documents_ref.at[row, rows]))
    dscores = scale * pairs * dot(dout, new, trans_b=True)
    pltriton.store(dscores_ref.at[row, rows, head, :], dscores.astype(dscores_ref.dtype))
    weighed = dscores * dot(q, k, trans_b=True)
    dsums = jnp.sum(weighed, axis=1) - jnp.sum(weighed, axis=0)
    dtriangle = jnp.where(below(), -pairs * dot(dright, new, trans_b=True), 0.0)
    pltriton.store(dsystem_ref.at[row, rows, head, :], (beta[:, None] * dtriangle).astype(dsystem_ref.dtype))
    weighed = dtriangle * dot(k, k, trans_b=True)
    pltriton.store(dbeta_ref.at[row, head, rows], jnp.sum(weighed, axis=1))
    weighed = beta[:, None] * weighed
    dsums = dsums + jnp.sum(weighed, axis=1) - jnp.sum(weighed, axis=0)
    passed = passing_ref[row, head, number] * _inner_product(states_ref, dstates_ref, (row, number, head))
    last = lax.iota(jnp.int32, CHUNK) == CHUNK - 1
    pltriton.store(dsums_ref.at[row, head, rows], dsums + jnp.where(last, passed, 0.0))


def _keys_backward(
    q_ref,
    k_ref,
    dout_ref,
    new_ref,
    dright_ref,
    dscores_ref,
    dsystem_ref,
    states_ref,
    dstates_ref,
    beta_ref,
    entering_ref,
    leaving_ref,
    dq_ref,
    dk_ref,
    dsums_ref,
    dbeta_ref,
    *,
    groups: int,
    scale: float,
):
    """Gradients of some features of a key head's queries and keys in a chunk, and their part in those of the gates."""
    number, index, row = (pl.program_id(axis) for axis in range(3))
    parts = k_ref.shape[3] // CHUNK
    key_head, part = index // parts, index % parts
    rows, features = pl.ds(number * CHUNK, CHUNK), pl.ds(part * CHUNK, CHUNK)
    last = lax.iota(jnp.int32, CHUNK) == CHUNK - 1

    def of_head(index, sums):
        dq, dk = sums
        head = key_head * groups + index
        beta, entering, leaving = (
            pltriton.load(ref.at[row, head, rows]) for ref in (beta_ref, entering_ref, leaving_ref)
        )
        q, k = (pltriton.load(ref.at[row, rows, key_head, features]) for ref in (q_ref, k_ref))
        dscores, dsystem = (pltriton.load(ref.at[row, rows, head, :]) for ref in (dscores_ref, dsystem_ref))
        dq, dk = dq + dot(dscores, k), dk + dot(dscores, q, trans_a=True)
        dk = dk + dot(dsystem, k) + dot(dsystem, k, trans_a=True)
        place = row, number, head, features
        state, dstate = (pltriton.load(ref.at[*place, :]) for ref in (states_ref, dstates_ref))
        from_state = (
            scale * entering[:, None] * dot(pltriton.load(dout_ref.at[row, rows, head, :]), state, trans_b=True)
        )
        dsums = jnp.sum(from_state * q.astype(jnp.float32), axis=1)
        dright = pltriton.load(dright_ref.at[row, rows, head, :])
        corrected = -entering[:, None] * dot(dright, state, trans_b=True)
        seen = jnp.sum(corrected * k.astype(jnp.float32), axis=1)
        to_state = leaving[:, None] * dot(pltriton.load(new_ref.at[row, rows, head, :]), dstate, trans_b=True)
        left = jnp.sum(to_state * k.astype(jnp.float32), axis=1)
        dsums = dsums + beta * seen - left + jnp.where(last, jnp.sum(left), 0.0)
        pltriton.store(dsums_ref.at[part, row, head, rows], dsums)
        pltriton.store(dbeta_ref.at[part, row, head, rows], seen)
        return dq + from_state, dk + to_state + beta[:, None] * corrected

    zeros = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    dq, dk = lax.fori_loop(jnp.int32(0), jnp.int32(groups), of_head, (zeros, zeros))
    pltriton.store(dq_ref.at[row, rows, key_head, features], dq.astype(dq_ref.dtype))
    pltriton.store(dk_ref.at[row, rows, key_head, features], dk.astype(dk_ref.dtype))


def _inner_product(one_ref, other_ref, place: tuple) -> Array:
    """The sum of the products of two states' elements, of a few rows at a time: registers are few."""
    total = jnp.float32(0)
    for start in range(0, one_ref.shape[3], 16):
        rows = (pltriton.load(ref.at[*place, pl.ds(start, 16), :]) for ref in (one_ref, other_ref))
        one, other = (array.astype(jnp.float32) for array in rows)
        total = total + jnp.sum(one * other)
    return total
