"""The loop over the layers: one block function a stack, called once or scanned, with its rematerialisation.

The loop knows nothing of what a block computes, and a block nothing of the loop, so that another loop (that streams or
offloads the layers' weights, or updates each layer) can take this one's place.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastjax.models.layout import LayerStack
from fastjax.models.remat import checkpointed

#: Auxiliary losses by name, such as a router's load balance; none: an empty dictionary, which compiles to nothing.
Losses = dict[str, Float[Array, ""]]


class Block(Protocol):
    """One period of a stack's layers, a pure function."""

    def __call__(
        self, x: Float[Array, "B S E"], state: Any, shared: Any, repeat: Int[Array, ""], cache: Any
    ) -> tuple[Float[Array, "B S E"], Any, Losses]:
        """The output, the cache with this step's tokens (None without one), and the layers' auxiliary losses.

        Args:
            x: the input.
            state: the layers' arrays.
            shared: arrays that all layers read.
            repeat: number of the period in its stack.
            cache: of these layers, or None.
        """
        ...


class Looped(NamedTuple):
    """The result of all layers.

    Attributes:
        x: output of the last layer.
        caches: one a stack; None each without caches.
        losses: auxiliary losses, summed over the layers.
    """

    x: Float[Array, "B S E"]
    caches: list[Any]
    losses: Losses


def run_layers(
    plan: Sequence[LayerStack],
    blocks: Sequence[tuple[Block, Any]],
    x: Float[Array, "B S E"],
    shared: Any,
    caches: Sequence[Any] | None,
    *,
    remat: str,
) -> Looped:
    """Run the stacks one after another: `lax.scan` where a stack repeats, else a plain call.

    Args:
        plan: the stacks.
        blocks: the block of each and its state, whose leaves lead with the count where the stack repeats.
        x: the first layer's input.
        shared: arrays that all layers read.
        caches: one a stack, laid out as the state; None: none.
        remat: policy of `checkpointed`; a pass with caches has no backward pass and keeps nothing.
    """
    after: list[Any] = []
    total: Losses = {}
    for number, (stack, (block, state)) in enumerate(zip(plan, blocks, strict=True)):
        block = checkpointed(block, remat if caches is None else "none", scanned=stack.count > 1)
        past = None if caches is None else caches[number]
        if stack.count == 1:
            x, cache, losses = block(x, state, shared, jnp.int32(0), past)
        else:

            def body(x, xs, block=block):
                state, repeat, past = xs
                x, cache, losses = block(x, state, shared, repeat, past)
                return x, (cache, losses)

            repeats = jnp.arange(stack.count, dtype=jnp.int32)
            x, (cache, losses) = jax.lax.scan(body, x, (state, repeats, past))
            losses = {name: jnp.sum(loss) for name, loss in losses.items()}
        after.append(cache)
        total = added(total, losses)
    return Looped(x, after, total)


def added(left: Losses, right: Losses) -> Losses:
    """The sums of auxiliary losses; a name may be missing on either side.

    Args:
        left: some layers' losses.
        right: other layers' losses.
    """
    return left | {name: left[name] + loss if name in left else loss for name, loss in right.items()}
