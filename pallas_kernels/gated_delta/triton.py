"""The rule by chunks in Pallas-Triton, for NVIDIA GPUs from Ampere on; arguments as in `api.REGISTRY`.

Three kinds of kernels. What stands in no other chunk (solved systems, scores) is made for all chunks at once. The
states go from chunk to chunk: a program has some columns of a value head's state and walks along a part of the row,
from one place where a document begins to the next. Of the backward pass all but the states' gradients is again made for
all chunks at once (`triton_backward`). Products are of 16 bits and summed in float32, in which the states stay.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.dispatch import num_cores, target
from pallas_kernels.gated_delta.chunks import CHUNK, Chunks, factors

#: Parts of a row that documents may start.
PARTS = 8
dot = pltriton.dot


class Gates(NamedTuple):
    """Operands of a walk beside the tokens; arrays, or references to them in a kernel.

    Attributes:
        beta: [B, H, S].
        entering: [B, H, S], as of `Factors`.
        leaving: [B, H, S], as there.
        passing: [B, H, N], as there.
        documents: [B, S].
        before: [B, N], as of `Chunks`.
        bounds: [B, P + 1], of the parts.
    """

    beta: Any
    entering: Any
    leaving: Any
    passing: Any
    documents: Any
    before: Any
    bounds: Any


def forward(
    q: Array, k: Array, v: Array, chunks: Chunks, state: Array, scale: float, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """The output [B, S, H, Dv], the state after the last token, and `inner` [B, S, H, C]."""
    return _forward(q, k, v, chunks, state, scale, columns_of(v), interpret)


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _forward(q, k, v, chunks: Chunks, state, scale: float, width: int, interpret: bool):
    inner, scores = prepare(q, k, v, chunks, interpret)
    out, after = walk(
        functools.partial(along, scale=scale, width=width),
        (q, k, v, inner, scores, *gates_of(chunks), state),
        (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)),
        name="gated_delta_forward",
        grid=grid(v, width),
        interpret=interpret,
    )
    return out, after, inner


def walk(kernel: Any, operands: Any, results: Any, *, name: str, grid: tuple[int, ...], interpret: bool) -> Any:
    """Run a kernel that walks along the chunks."""
    return pl.pallas_call(
        kernel,
        out_shape=results,
        in_specs=[None if operand is None else pl.no_block_spec for operand in operands],
        grid=grid,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=_stages()),
        interpret=interpret,
        name=name,
    )(*operands)


def _stages() -> int:
    """Chunks whose operands a program holds at a time; a multiprocessor of Hopper has the shared memory for three."""
    return 2 if target().lacks((9, 0), exactly=True) else 3


def grid(v: Array, width: int) -> tuple[int, int, int]:
    """Programs of a walk: by their columns, their head, and row and part."""
    batch, _, heads, size = v.shape
    return size // width, heads, batch * PARTS


def columns_of(v: Array) -> int:
    """Columns of a value head's state that a program has: fewer, where else multiprocessors would be idle."""
    batch, _, heads, size = v.shape
    return min(size, 64 if batch * heads * (size // 64) >= num_cores() else 32)


def gates_of(chunks: Chunks) -> Gates:
    """The gates of whole rows."""
    shape, of_chunks = chunks.beta.shape, factors(chunks)
    entering, leaving = of_chunks.entering.reshape(shape), of_chunks.leaving.reshape(shape)
    places = chunks.documents, chunks.before, parts(chunks)
    return Gates(chunks.beta, entering, leaving, of_chunks.passing, *places)


def parts(chunks: Chunks) -> Array:
    """Bounds [B, P + 1] of the parts of each row: chunks in which a document begins, near to equal parts."""
    count = chunks.before.shape[1]
    last = chunks.documents[:, CHUNK - 1 :: CHUNK]
    begins = jnp.where(last != chunks.before, jnp.arange(count, dtype=jnp.int32)[None], count)
    following = jnp.pad(lax.cummin(begins, axis=1, reverse=True), ((0, 0), (0, 1)), constant_values=count)
    inner = following[:, jnp.asarray([-(-count * part // PARTS) for part in range(1, PARTS + 1)])]
    return jnp.concatenate([jnp.zeros_like(inner[:, :1]), inner], axis=1)


def prepare(q: Array, k: Array, v: Array, chunks: Chunks, interpret: bool, inner: bool = True) -> tuple[Array, ...]:
    """`inner`, if wanted, and the scores L ∘ Q Kᵀ of all chunks, [B, S, H, C] in v's dtype."""
    batch, length, heads, _ = v.shape
    key_heads, count = k.shape[2], length // CHUNK
    sums = jnp.cumsum(chunks.decay.reshape(batch, heads, count, CHUNK), axis=-1).reshape(batch, heads, length)
    shape = jax.ShapeDtypeStruct((batch, length, heads, CHUNK), v.dtype)
    return pl.pallas_call(
        functools.partial(_prepare, groups=heads // key_heads, inner=inner),
        out_shape=(shape,) * (1 + inner),
        grid=(count, heads, batch),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_prepare" if inner else "gated_delta_scores",
    )(q, k, sums, chunks.beta, chunks.documents)


def _prepare(q_ref, k_ref, sums_ref, beta_ref, documents_ref, *out_refs, groups: int, inner: bool):
    chunk, head, batch = (pl.program_id(axis) for axis in range(3))
    rows, key_head = pl.ds(chunk * CHUNK, CHUNK), head // groups
    q, k = (pltriton.load(ref.at[batch, rows, key_head, :]) for ref in (q_ref, k_ref))
    sums, documents = pltriton.load(sums_ref.at[batch, head, rows]), pltriton.load(documents_ref.at[batch, rows])
    pairs = pair_factors(sums, documents)
    pltriton.store(out_refs[-1].at[batch, rows, head, :], (pairs * dot(q, k, trans_b=True)).astype(q.dtype))
    if inner:
        beta = pltriton.load(beta_ref.at[batch, head, rows])
        triangle = jnp.where(below(), beta[:, None] * pairs * dot(k, k, trans_b=True), 0.0)
        pltriton.store(out_refs[0].at[batch, rows, head, :], _inner(triangle).astype(q.dtype))


def pair_factors(sums: Array, documents: Array) -> Array:
    """L [C, C] of a chunk's tokens."""
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    seen = (row >= column) & (documents[:, None] == documents[None])
    return jnp.where(seen, jnp.exp(jnp.where(seen, sums[:, None] - sums[None], 0.0)), 0.0)


def below() -> Array:
    """Which pairs of tokens [C, C] are strictly below the diagonal."""
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return row > column


def _inner(triangle: Array) -> Array:
    """(I + triangle)⁻¹ - I: of blocks on the diagonal row by row, then of blocks of twice the size from their halves.

    Products are of the leading bits of both operands and of what these leave, three of 16 bits each.
    """
    size, count = 16, CHUNK // 16
    block = tuple(lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) // size for axis in (0, 1))
    on_diagonal = block[0] == block[1]
    blocks = jnp.sum(jnp.where(on_diagonal, triangle, 0.0).reshape(count, size, count, size), axis=2)
    row, column = (lax.broadcasted_iota(jnp.int32, blocks.shape, axis) for axis in (1, 2))

    def with_row(number, inverse):
        factors = jnp.sum(jnp.where(row == number, blocks, 0.0), axis=1)
        change = jnp.sum(factors[:, :, None] * jnp.where(row < number, inverse, 0.0), axis=1)
        return jnp.where(row == number, inverse - change[:, None], inverse)

    inverse = jnp.where(row == column, 1.0, 0.0)
    inverse = lax.fori_loop(jnp.int32(1), jnp.int32(size), with_row, inverse)
    inverse = jnp.broadcast_to(inverse[:, :, None], (count, size, count, size)).reshape(CHUNK, CHUNK)
    inverse = jnp.where(on_diagonal, inverse, 0.0)
    product = functools.partial(dot, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
    while size < CHUNK:
        block = tuple(lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) // size for axis in (0, 1))
        part = jnp.where((block[0] % 2 == 1) & (block[0] == block[1] + 1), triangle, 0.0)
        inverse = inverse - product(product(inverse, part), inverse)
        size *= 2
    return jnp.where(below(), inverse, 0.0)


class Steps(NamedTuple):
    """The chunks of a program's walk along a part of a row.

    Attributes:
        head: the program's.
        row: the program's.
        columns: of the state that it has.
        begin: the first chunk.
        end: behind the last; the tokens there of the document that goes on are the program's too.
        count: of chunks, that one included.
        first: whether the row begins here.
        last: whether the row ends here.
    """

    head: Any
    row: Any
    columns: Any
    begin: Any
    end: Any
    count: Any
    first: Any
    last: Any

    def own(self, chunk: Any, documents: Array, before: Any) -> Array:
        """Which tokens of a chunk are the program's."""
        going_on = documents == before
        return jnp.where((chunk == self.begin) & ~self.first, ~going_on, going_on | (chunk < self.end))


def steps(gates: Gates, width: int) -> Steps:
    """The steps of the program that asks."""
    column, head, index = (pl.program_id(axis) for axis in range(3))
    row, part, total = index // PARTS, index % PARTS, gates.before.shape[1]
    begin, end = gates.bounds[row, part], gates.bounds[row, part + 1]
    count = jnp.where(begin < end, jnp.minimum(end + 1, total) - begin, 0)
    return Steps(head, row, pl.ds(column * width, width), begin, end, count, part == 0, (begin < end) & (end == total))


def along(q_ref, k_ref, v_ref, inner_ref, scores_ref, *refs, scale: float, width: int):
    """From chunk to chunk: the output and the last state; without queries states before chunks and the new values."""
    gates, (state_ref, *out_refs) = Gates(*refs[: len(Gates._fields)]), refs[len(Gates._fields) :]
    at = steps(gates, width)
    head, row, columns = at.head, at.row, at.columns
    key_head = head // (v_ref.shape[2] // k_ref.shape[2])

    def loaded(index):
        """Values and gates of a chunk: no operands of products, they would be waited for."""
        number = at.begin + jnp.minimum(index, at.count - 1)
        rows = pl.ds(number * CHUNK, CHUNK)
        gated = (pltriton.load(ref.at[row, head, rows]) for ref in gates[:3])
        return pltriton.load(v_ref.at[row, rows, head, columns]), *gated, gates.passing[row, head, number]

    def chunk(index, carry):
        state, (v, *gated, passing) = carry
        beta, entering, leaving = (array[:, None] for array in gated)
        following = loaded(index + 1)
        number = at.begin + index
        rows = pl.ds(number * CHUNK, CHUNK)
        k = pltriton.load(k_ref.at[row, rows, key_head, :])
        inner = pltriton.load(inner_ref.at[row, rows, head, :])
        own = at.own(number, pltriton.load(gates.documents.at[row, rows]), gates.before[row, number])[:, None]
        held = state.astype(k.dtype)
        right = beta * (v.astype(jnp.float32) - entering * dot(k, held))
        new = right + dot(inner, right.astype(k.dtype))
        if q_ref is None:
            states_ref, new_ref = out_refs
            pltriton.store(new_ref.at[row, rows, head, columns], new.astype(k.dtype), mask=own)

            @pl.when((index > 0) | at.first)
            def _():
                states_ref[row, number, head, :, columns] = held
        else:
            q = pltriton.load(q_ref.at[row, rows, key_head, :])
            scores = pltriton.load(scores_ref.at[row, rows, head, :])
            out = entering * dot(q, held) + dot(scores, new.astype(k.dtype))
            pltriton.store(out_refs[0].at[row, rows, head, columns], (scale * out).astype(k.dtype), mask=own)
        given = (leaving * new).astype(k.dtype)
        return passing * state + dot(k, given, trans_a=True), following

    state = jnp.where(at.first, state_ref[row, head, :, columns], 0.0)
    state, _ = lax.fori_loop(jnp.int32(0), at.count, chunk, (state, loaded(0)))
    if q_ref is not None:

        @pl.when(at.last)
        def _():
            out_refs[1][row, head, :, columns] = state
