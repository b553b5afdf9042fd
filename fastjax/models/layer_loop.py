"""The loop over the layers: one block function a stack, called once or scanned, with its rematerialisation.

The loop knows nothing of what a block computes, and a block nothing of the loop, so that another loop (that streams or
offloads the layers' weights, or updates each layer) can take this one's place.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastjax.models.layout import LayerStack
from fastjax.models.remat import checkpointed, offloads, policy_of
from fastjax.models.streamed import has_streamed, on_device, run_streamed
from fastjax.parallel import several_devices
from fastjax.parallel.gather import splits_weights

#: Sums over the layers by name, such as the routers' loads; none: an empty dictionary, which compiles to nothing.
Sums = dict[str, Float[Array, "..."]]


class Block(Protocol):
    """One period of a stack's layers, a pure function."""

    def __call__(
        self, x: Float[Array, "B S E"], state: Any, shared: Any, first: Int[Array, ""], cache: Any
    ) -> tuple[Float[Array, "B S E"], Any, Sums]:
        """The output, the cache with this step's tokens (None without one), and the layers' sums.

        Args:
            x: the input.
            state: the layers' arrays.
            shared: arrays that all layers read.
            first: number of the first layer.
            cache: of these layers, or None.
        """
        ...


class Looped(NamedTuple):
    """The result of all layers.

    Attributes:
        x: output of the last layer.
        caches: one a stack; None each without caches.
        sums: over the layers.
    """

    x: Float[Array, "B S E"]
    caches: list[Any]
    sums: Sums


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
        remat: as `policy_of` takes it; a stack's layers are of one policy. A pass with caches has no backward pass and
            keeps nothing.
    """
    gathers = splits_weights()

    @functools.cache
    def single(block: Block, policy: str) -> Block:
        """Equal layers that are called one by one are traced and lowered once, under one jit."""

        def own(*arguments: Any) -> Any:  # JAX keeps traces by the function: another pass may choose otherwise
            return block(*arguments)

        return jax.jit(checkpointed(own, policy, scanned=False, gathers=gathers))

    after: list[Any] = []
    total: Sums = {}
    for number, (stack, (block, state)) in enumerate(zip(plan, blocks, strict=True)):
        policy = policy_of(remat, stack.start) if caches is None else "none"
        past = None if caches is None else caches[number]
        if stack.count == 1:
            x, cache, sums = single(block, policy)(x, state, shared, jnp.int32(stack.start), past)
        elif past is None and (has_streamed(state) or (offloads(policy) and not several_devices())):
            block = checkpointed(block, policy, scanned=True, moves=False)

            def layer(x, state, shared, repeat, block=block, stack=stack):
                x, _, sums = block(x, state, shared, stack.start + stack.period * repeat, None)
                return x, sums

            cache = None
            x, sums = run_streamed(layer, x, state, shared, stack.count, offload=offloads(policy))
            sums = {name: jnp.sum(values, axis=0) for name, values in sums.items()}
        else:
            block = checkpointed(block, policy, scanned=True, gathers=gathers)

            def body(x, xs, block=block):
                state, first, past = xs
                x, cache, sums = block(x, on_device(state), shared, first, past)
                return x, (cache, sums)

            firsts = stack.start + stack.period * jnp.arange(stack.count, dtype=jnp.int32)
            x, (cache, sums) = jax.lax.scan(body, x, (state, firsts, past))
            sums = {name: jnp.sum(values, axis=0) for name, values in sums.items()}
        after.append(cache)
        total = added(total, sums)
    return Looped(x, after, total)


def added(left: Sums, right: Sums) -> Sums:
    """The sums of both; a name may be missing on either side.

    Args:
        left: of some layers.
        right: of other layers.
    """
    return left | {name: left[name] + value if name in left else value for name, value in right.items()}
