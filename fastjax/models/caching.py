"""A decoder that remembers: new tokens after those whose states its layers hold, for generation.

The layers are the same; each mixer takes a step from its `LayerState` in the place of a pass over whole rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastjax.models.context import Context, Slots
from fastjax.models.decoder import Decoder, embed, rotary_tables
from fastjax.models.rotary import query_scales


def empty_states(model: Decoder, batch: int, length: int) -> list[Any]:
    """The states of a decoder's layers before the first token, one tree a stack.

    Args:
        model: the decoder.
        batch: rows.
        length: the most tokens that a row will have.
    """

    def one(layer: Any, count: int) -> Any:
        state = layer.mixer.init(batch, length, model.precision.dtype)
        return state if count == 1 else jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), state)

    stacks = zip(model.plan, model.layers, strict=True)
    return [[one(layer, stack.count) for layer in layers] for stack, layers in stacks]


def step(
    model: Decoder, tokens: Int[Array, "B S"], positions: Int[Array, "B S"], slots: Slots, states: list[Any]
) -> tuple[Float[Array, "B S E"], list[Any]]:
    """Hidden states of S new tokens after those that the states hold, and the states with them.

    Args:
        model: the decoder.
        tokens: the new tokens.
        positions: their positions.
        slots: their places, and those before.
        states: as `empty_states` makes them.
    """
    # Keys are turned when they come, before it is known how long the row gets: it counts for as long as it may get.
    longest = jnp.full(positions.shape, slots.filled.shape[1], jnp.int32)
    rotary, scales = rotary_tables(model.config, positions, longest), query_scales(model.config, positions)
    context, x = Context(rotary, None, None, scales, slots=slots), embed(model, tokens)
    with jax.named_scope("layers"):
        x, states = model.executor.step(model, x, context, states)
    return model.norm(x), states
