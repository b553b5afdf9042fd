"""A decoder's execution: the plain one, of which an execution of runs is a kind."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fastjax.models.context import Context, Sums, added
from fastjax.models.layer import apply_layers, step_layers

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Executor:
    """How a decoder is executed: one layer after another, on one device; hashable, as it is static in a program.

    `fastjax.execution` has the one of runs: rematerialisation, meshes, memories.
    """

    def own_tokens(self, arrays: T) -> T:
        """The part of a batch's arrays [B, S, …] that the layers compute here."""
        return arrays

    def in_order(self, hidden: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """Hidden states of `own_tokens` in the order of the rows."""
        return hidden

    def look_up(self, table: Float[Array, "V E"], tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
        """Rows of a table."""
        return jnp.take(table, tokens, axis=0)

    def run(self, model: Any, x: Float[Array, "B S E"], context: Context) -> tuple[Float[Array, "B S E"], Sums]:
        """All layers of a decoder on whole rows: their output, and sums over them.

        Args:
            model: the decoder.
            x: embeddings.
            context: of all layers.
        """
        total: Sums = {}
        for first, _, layers, _ in periods(model):
            x, sums = apply_layers(layers, x, context, first)
            total = added(total, sums)
        return x, total

    def step(
        self, model: Any, x: Float[Array, "B S E"], context: Context, states: list[list[Any]]
    ) -> tuple[Float[Array, "B S E"], list[list[Any]]]:
        """All layers of a decoder on new tokens: their output, and the states with them.

        Args:
            model: the decoder.
            x: embeddings.
            context: of all layers, with `slots`.
            states: as `caching.empty_states` makes them.
        """
        states = list(states)
        for first, number, layers, repeat in periods(model):
            x, states[number], _ = step_layers(layers, x, of_layer(context, repeat), first, states[number])
        return x, states


def of_layer(context: Context, layer: Int[Array, ""]) -> Context:
    """The context of a layer on new tokens.

    Args:
        context: of all.
        layer: its number in its stack.
    """
    assert context.slots is not None, "new tokens have slots"
    return context._replace(slots=context.slots._replace(layer=layer))


def periods(model: Any) -> Any:
    """Every period of every stack: number of its first layer, number of the stack, its layers, its number in the stack.

    Args:
        model: the decoder.
    """
    for number, (stack, layers) in enumerate(zip(model.plan, model.layers, strict=True)):
        graphdef, variables = nnx.split(layers)
        whole = nnx.to_pure_dict(variables)
        for repeat in range(stack.count):
            arrays = whole if stack.count == 1 else jax.tree.map(lambda leaf, at=repeat: leaf[at], whole)
            first = jnp.int32(stack.start + stack.period * repeat)
            yield first, number, nnx.merge(graphdef, arrays), jnp.int32(repeat)
