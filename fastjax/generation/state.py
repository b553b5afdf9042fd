"""The state of a decoder that generates: one pytree of arrays on the device, with a row for each answer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fastjax.buffers import zeros
from fastjax.generation.options import MAX_STOPS, GenerationOptions
from fastjax.generation.sampling import Sampling, host_arrays
from fastjax.models.caching import empty_states
from fastjax.models.decoder import Decoder


class Rows(NamedTuple):
    """The answers' own arrays, R rows.

    Attributes:
        table: pages of each row, from its first token on; 0 behind the last one that it may need.
        lengths: tokens of prompt and answer that the layers hold.
        token: the last token, which the layers do not hold yet.
        answered: tokens of the answer, that one included.
        limits: the most tokens of the answer.
        longest: the most tokens of prompt and answer, for rotary angles that depend on it.
        stops: tokens that end the answer; -1: none.
        going: whether the answer goes on.
        sampling: how its tokens are picked.
        adapters: number of its adapter, where several are joined; -1: none.
        seen: bit 0: whether a word stands in the prompt; above it how often it stands in the answer.
    """

    table: Int[Array, "R M"]
    lengths: Int[Array, "R"]
    token: Int[Array, "R"]
    answered: Int[Array, "R"]
    limits: Int[Array, "R"]
    longest: Int[Array, "R"]
    stops: Int[Array, "R N"]
    going: Bool[Array, "R"]
    sampling: Sampling
    adapters: Int[Array, "R"]
    seen: Int[Array, "R V"]


class EngineState(NamedTuple):
    """All that generation keeps.

    Attributes:
        rows: of the answers.
        layers: `mixers.LayerState` of each stack's layers.
    """

    rows: Rows
    layers: list[list[Any]]


def empty_state(model: Decoder, rows: int, pages: tuple[int, int], width: int, dtype: jnp.dtype) -> EngineState:
    """The state before the first prompt.

    Args:
        model: the decoder.
        rows: answers at a time.
        pages: how many there are (page 0 is nobody's), and tokens of each.
        width: the most pages of a row.
        dtype: of what is kept of a token.
    """
    words = model.config.vocab_size

    def state() -> EngineState:
        numbers = jnp.zeros(rows, jnp.int32)
        own = Rows(
            table=jnp.zeros((rows, width), jnp.int32),
            lengths=numbers,
            token=numbers,
            answered=numbers,
            limits=numbers,
            longest=numbers,
            stops=jnp.zeros((rows, MAX_STOPS), jnp.int32),
            going=jnp.zeros(rows, bool),
            sampling=jax.tree.map(jnp.asarray, host_arrays([GenerationOptions()] * rows, [0] * rows, words)),
            adapters=numbers,
            seen=jnp.zeros((rows, words), jnp.int32),
        )
        return EngineState(own, empty_states(model, rows, pages, dtype))

    # Each leaf is a buffer of its own, since programs use the state up; a row is set before it is read.
    return zeros(jax.eval_shape(state))


def by_axis(states: list[list[Any]], name: str, of: Any) -> list[list[Any]]:
    """The layers' states with another leaf for each that has an axis.

    Args:
        states: of each stack's layers.
        name: of the axis.
        of: (leaf, position of the axis) -> leaf.
    """

    def one(state: Any) -> Any:
        leaves = (
            of(leaf, axes.index(name)) if name in axes else leaf for leaf, axes in zip(state, state.AXES, strict=True)
        )
        return type(state)(*leaves)

    return [[one(state) for state in stack] for stack in states]


def has_axis(states: list[list[Any]], name: str) -> bool:
    """Whether a layer's state has an axis."""
    return any(name in axes for stack in states for state in stack for axes in state.AXES)


class Prompts(NamedTuple):
    """Prompts, or a piece of one, for `programs.prefill`: packed into one row of S tokens, for E answers.

    Attributes:
        tokens: the tokens, 0 where there are none.
        positions: place of each in its prompt.
        answers: the entry, 0 … E - 1, whose prompt each token is of; E: padding.
        rows: row of each entry; R: none.
        sources: entry whose prompt each entry shares, its own if it has one in `tokens`.
        copies: page of the source, and page of its own, into which what the answers do not share is copied; 0: none.
        ends: place in `tokens` of the prompt's last token; -1 while it goes on.
        fresh: whether it is the prompt's first piece.
        following: the prompt's token behind each; -1: none.
        scored: whether any prompt's log-probabilities are asked for.
        settings: of the entries, as of the rows.
    """

    tokens: Int[Array, "S"]
    positions: Int[Array, "S"]
    answers: Int[Array, "S"]
    rows: Int[Array, "E"]
    sources: Int[Array, "E"]
    copies: Int[Array, "E 2"]
    ends: Int[Array, "E"]
    fresh: Bool[Array, "E"]
    following: Int[Array, "S"]
    scored: Bool[Array, ""]
    table: Int[Array, "E M"]
    lengths: Int[Array, "E"]
    limits: Int[Array, "E"]
    longest: Int[Array, "E"]
    stops: Int[Array, "E N"]
    sampling: Sampling
    adapters: Int[Array, "E"]
