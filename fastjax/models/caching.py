"""A decoder that remembers: new tokens after those whose states its layers hold, for generation.

The layers are the same; each mixer takes a step from its `LayerState` in the place of a pass over whole rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastjax.models.context import Context, Slots, document_ranges
from fastjax.models.decoder import Decoder, embed, rotary_tables
from fastjax.models.rotary import query_scales

#: Tokens of a page, measured on an H100 (docs/lab/attention.md).
PAGE = 64


def empty_states(model: Decoder, batch: int, pages: tuple[int, int], dtype: jnp.dtype | None = None) -> list[list[Any]]:
    """The states of a decoder's layers before the first token: of each stack those of its period, for all its layers.

    Args:
        model: the decoder.
        batch: rows.
        pages: how many there are (page 0 is nobody's), and tokens of each.
        dtype: of what is kept of a token; None: that of the computation.
    """
    dtype = model.precision.dtype if dtype is None else dtype
    stacks = zip(model.plan, model.layers, strict=True)
    return [[layer.mixer.init(stack.count, batch, pages, dtype) for layer in layers] for stack, layers in stacks]


def step(
    model: Decoder,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    longest: Int[Array, "B S"],
    slots: Slots,
    states: list[list[Any]],
    segment_ids: Int[Array, "B S"] | None = None,
    adapters: Int[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B S E"], list[list[Any]]]:
    """Hidden states of S new tokens after those that the states hold, and the states with them.

    Args:
        model: the decoder.
        tokens: the new tokens.
        positions: their positions.
        longest: how long each one's row may get: keys are turned when they come, before it is known how long it gets.
        slots: their places, and those before.
        states: as `empty_states` makes them.
        segment_ids: document of each token, 0 for padding, where several begin in a row; None: each goes on a row.
        adapters: number of each token's adapter, where they are joined; -1: none.
    """
    rotary, scales = rotary_tables(model.config, positions, longest), query_scales(model.config, positions)
    ranges = None if segment_ids is None else document_ranges(segment_ids)
    context = Context(rotary, ranges, None, scales, mask=slots.tokens != 0, slots=slots)
    if model.rank_owners is not None:
        assert adapters is not None, "joined adapters are chosen"
        chosen = adapters[:, :, None] == model.rank_owners[...][None, None]
        context = context._replace(chosen=chosen.astype(jnp.int8))
    x = embed(model, tokens)
    with jax.named_scope("layers"):
        x, states = model.executor.step(model, x, context, states)
    return model.norm(x), states
