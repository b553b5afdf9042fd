"""The two programs of generation, pure functions of the state: prompts into it, and tokens out of it.

Nothing that differs from request to request is static, so each is compiled once a shape.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from fastjax.generation.bound import BoundDecoder
from fastjax.generation.sampling import Picked, Told, pick, tell
from fastjax.generation.state import EngineState, Prompts, Rows, by_axis, has_axis
from fastjax.models.caching import step
from fastjax.models.context import Slots
from fastjax.models.decoder import Decoder, lm_logits

#: Tokens of prompts whose logits are computed at once.
_BLOCK = 256
#: What XLA makes CUDA graphs of: its default, and loops and conditions, for whose outcome the host would wait at each
#: turn, so that a call came back when the device had ended it. An `XLA_FLAGS` that says it is left alone.
_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}


def _program(function: Callable[..., Any], *, static_argnames: tuple[str, ...]) -> Any:
    """Jit a function that uses its state up and returns before the device has ended it."""
    options = _graphs()
    return jax.jit(function, static_argnames=static_argnames, donate_argnames=("state",), compiler_options=options)


def _graphs() -> dict[str, str]:
    """XLA's options that `XLA_FLAGS` leaves open."""
    return {name: value for name, value in _GRAPHS.items() if name not in os.environ.get("XLA_FLAGS", "")}


class Decoded(NamedTuple):
    """Tokens of W rows, as they came in up to K steps.

    Attributes:
        tokens: -1 where a row had ended.
        log_probs: as of `Picked`.
        likeliest_ids: as of `Picked`.
        likeliest: as of `Picked`.
    """

    tokens: Int[Array, "K W"]
    log_probs: Float[Array, "K W"]
    likeliest_ids: Int[Array, "K W A"]
    likeliest: Float[Array, "K W A"]


@functools.partial(_program, static_argnames=("packed",))
def prefill(
    decoder: BoundDecoder, state: EngineState, prompts: Prompts, *, packed: bool
) -> tuple[EngineState, Picked, Told]:
    """Take prompts in, and pick the first token of each answer whose prompt ends.

    Args:
        decoder: the model.
        state: of the rows so far; it is used up.
        prompts: what comes.
        packed: whether all of them begin here; else there is one, which goes on where its row ends.

    Returns:
        The state; the tokens of the entries [E], of which those without an end mean nothing; and what is told of the
        tokens behind those that came in [S], zeros if no prompt is `scored`.
    """
    model = nnx.merge(decoder.graphdef, *decoder.trees)
    count = prompts.rows.shape[0]
    real = prompts.answers < count
    entry = jnp.minimum(prompts.answers, count - 1)
    rows = _admitted(state.rows, prompts, entry, real)
    page = _page(state.layers)
    slots = Slots(
        tokens=real[None].astype(jnp.int32),
        rows=jnp.where(real, prompts.rows[entry], rows.going.shape[0])[None],
        positions=prompts.positions[None],
        pages=jnp.where(real, prompts.table[entry, prompts.positions // page], 0)[None],
        table=prompts.table[:1],
        lengths=prompts.lengths[:1],
        layer=jnp.int32(0),
    )
    hidden, layers = step(
        model,
        prompts.tokens[None],
        prompts.positions[None],
        prompts.longest[entry][None],
        slots,
        state.layers,
        jnp.where(real, prompts.answers + 1, 0)[None] if packed else None,
        prompts.adapters[entry][None],
    )
    layers = _copied(layers, prompts)
    ends = hidden[:, jnp.maximum(prompts.ends, 0)]
    return *_picked(model, ends, EngineState(rows, layers), prompts), _told(model, hidden[0], prompts)


def _told(model: Decoder, hidden: Float[Array, "S E"], prompts: Prompts) -> Told:
    """The log-probabilities of the prompts' tokens, by blocks, whose logits are few."""
    count = hidden.shape[0]
    blocks = hidden.reshape(-1, min(count, _BLOCK), hidden.shape[1])
    following = jnp.maximum(prompts.following, 0).reshape(blocks.shape[:2])

    def block(both: tuple[Array, Array]) -> Told:
        return tell(lm_logits(model.lm_head, both[0][None])[0], both[1])

    shapes = jax.eval_shape(block, (blocks[0], following[0]))
    nothing = Told(*(jnp.zeros((count, *leaf.shape[1:]), leaf.dtype) for leaf in shapes))

    def every() -> Told:
        return jax.tree.map(
            lambda leaf, like: leaf.reshape(like.shape), jax.lax.map(block, (blocks, following)), nothing
        )

    return jax.lax.cond(prompts.scored, every, lambda: nothing)


def _picked(model: Decoder, ends: Array, state: EngineState, prompts: Prompts) -> tuple[EngineState, Picked]:
    """The first token of each answer whose prompt has ended, and the rows with it."""
    rows, where = state.rows, prompts.rows
    mine = _rows_at(rows, where)
    logits = lm_logits(model.lm_head, ends)[0]
    picked = pick(logits, mine.sampling, mine.seen, jnp.zeros_like(where))
    mine = mine._replace(answered=jnp.zeros_like(where), going=prompts.ends >= 0)
    return state._replace(rows=_rows_set(rows, _answered(mine, picked.tokens), where)), picked


@functools.partial(_program, static_argnames=("steps",))
def decode(
    decoder: BoundDecoder, state: EngineState, where: Int[Array, "W"], *, steps: int
) -> tuple[EngineState, Decoded]:
    """Generate tokens of some rows.

    Args:
        decoder: the model.
        state: of the rows; it is used up.
        where: the rows; R: none.
        steps: K, tokens of each row; a number that the device does not ask for, as it would for an end of all rows.

    Returns:
        The state and the tokens.
    """
    model, page = nnx.merge(decoder.graphdef, *decoder.trees), _page(state.layers)

    def body(number: Array, carry: Any) -> Any:
        rows, layers, out = carry
        lengths = jnp.where(rows.going, rows.lengths + 1, 0)
        own = jnp.take_along_axis(rows.table, (rows.lengths // page)[:, None], axis=1)
        slots = Slots(
            tokens=rows.going[:, None].astype(jnp.int32),
            rows=jnp.where(rows.going, where, state.rows.going.shape[0])[:, None],
            positions=rows.lengths[:, None],
            pages=jnp.where(rows.going[:, None], own, 0),
            table=rows.table,
            lengths=lengths,
            layer=jnp.int32(0),
        )
        token, length, longest = (each[:, None] for each in (rows.token, rows.lengths, rows.longest))
        hidden, layers = step(model, token, length, longest, slots, layers, adapters=rows.adapters[:, None])
        logits = lm_logits(model.lm_head, hidden)[:, 0]
        wanted = jax.tree.map(functools.partial(_where_going, rows.going), rows.sampling)
        picked = pick(logits, wanted, rows.seen, rows.answered)
        told = picked._replace(tokens=jnp.where(rows.going, picked.tokens, -1))
        out = jax.tree.map(lambda all, one: all.at[number].set(one), out, Decoded(*told))
        rows = rows._replace(lengths=jnp.where(rows.going, rows.lengths + 1, rows.lengths))
        return _answered(rows, picked.tokens), layers, out

    rows = _rows_at(state.rows, where)
    logits = jax.ShapeDtypeStruct((len(where), model.config.vocab_size), jnp.float32)
    shapes = jax.eval_shape(pick, logits, rows.sampling, rows.seen, rows.answered)
    # A loop like this, not a scan with outputs, becomes one graph.
    out = Decoded(*(jnp.zeros((steps, *leaf.shape), leaf.dtype) for leaf in shapes))
    rows, layers, out = jax.lax.fori_loop(0, steps, body, (rows, state.layers, out))
    return EngineState(_rows_set(state.rows, rows, where), layers), out


def _where_going(going: Bool[Array, "W"], setting: Array) -> Array:
    """A setting of the rows that go on, and zeros of the others, which ask for nothing."""
    return jnp.where(going.reshape(-1, *[1] * (setting.ndim - 1)), setting, 0)


def _answered(rows: Rows, tokens: Int[Array, "W"]) -> Rows:
    """The rows that go on with one more token, which may be their last."""
    answered = rows.answered + 1
    ended = jnp.any(tokens[:, None] == rows.stops, axis=1) | (answered >= rows.limits)
    every = jnp.arange(tokens.shape[0])
    return rows._replace(
        token=jnp.where(rows.going, tokens, rows.token),
        answered=jnp.where(rows.going, answered, rows.answered),
        seen=rows.seen.at[every, tokens].add(jnp.where(rows.going, 2, 0)),
        going=rows.going & ~ended,
    )


def _admitted(rows: Rows, prompts: Prompts, entry: Int[Array, "S"], real: Array) -> Rows:
    """The rows with the entries' settings, and the words of their prompts."""
    count, words = prompts.rows.shape[0], rows.seen.shape[1]
    mine = _rows_at(rows, prompts.rows)
    seen = jnp.where(prompts.fresh[:, None], 0, mine.seen)
    seen = seen.at[jnp.where(real, entry, count), jnp.clip(prompts.tokens, 0, words - 1)].max(1, mode="drop")
    seen = seen[prompts.sources]
    mine = mine._replace(
        table=prompts.table,
        lengths=prompts.lengths,
        limits=prompts.limits,
        longest=prompts.longest,
        stops=prompts.stops,
        sampling=prompts.sampling,
        adapters=prompts.adapters,
        seen=seen,
    )
    return _rows_set(rows, mine, prompts.rows)


def _rows_at(rows: Rows, where: Int[Array, "W"]) -> Rows:
    """Some rows; of those that are none a copy that has ended."""
    found = jax.tree.map(lambda leaf: jnp.take(leaf, where, axis=0, mode="clip"), rows)
    return found._replace(going=found.going & (where < rows.going.shape[0]))


def _rows_set(rows: Rows, some: Rows, where: Int[Array, "W"]) -> Rows:
    return jax.tree.map(lambda leaf, new: leaf.at[where].set(new, mode="drop"), rows, some)


def _page(layers: list[list[Any]]) -> int:
    """Tokens of a page; 1 where no layer has pages."""
    sizes = []
    by_axis(layers, "page", lambda leaf, axis: sizes.append(leaf.shape[axis]))
    return sizes[0] if sizes else 1


def _copied(layers: list[list[Any]], prompts: Prompts) -> list[list[Any]]:
    """The states with those of a shared prompt in the rows that share it, and in the pages of their own."""
    shares = prompts.sources != jnp.arange(prompts.sources.shape[0])
    order = jnp.argsort(~shares)

    def pages(layers: list[list[Any]]) -> list[list[Any]]:
        def of(leaf: Array, axis: int) -> Array:
            at = (slice(None),) * axis
            return leaf.at[(*at, prompts.copies[:, 1])].set(leaf[(*at, prompts.copies[:, 0])])

        return by_axis(layers, "pages", of)

    def row(number: Array, layers: list[list[Any]]) -> list[list[Any]]:  # of all at once a copy may be gigabytes
        entry = order[number]
        own, source = prompts.rows[entry], prompts.rows[prompts.sources[entry]]

        def of(leaf: Array, axis: int) -> Array:
            shared = jax.lax.dynamic_index_in_dim(leaf, source, axis)
            return jax.lax.dynamic_update_index_in_dim(leaf, shared, own, axis)

        return by_axis(layers, "rows", of)

    if has_axis(layers, "pages"):
        layers = jax.lax.cond(jnp.any(prompts.copies[:, 1] > 0), pages, lambda layers: layers, layers)
    if has_axis(layers, "rows"):
        layers = jax.lax.fori_loop(0, jnp.sum(shares), row, layers)
    return layers
