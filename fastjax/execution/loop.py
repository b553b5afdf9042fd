"""The loop over the layers: one block function a stack, called once or scanned, with its rematerialisation.

The loop knows nothing of what a block computes, and a block nothing of the loop, so that another loop (that streams or
offloads the layers' weights, or updates each layer) can take this one's place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fastjax.execution.policies import offloads
from fastjax.execution.remat import checkpointed
from fastjax.execution.streamed import has_streamed, on_device, run_streamed
from fastjax.models.context import Context, Sums, added
from fastjax.models.executor import of_layer
from fastjax.models.layout import LayerStack
from fastjax.parallel import local, several_devices
from fastjax.parallel.gather import splits_weights
from fastjax.parallel.islands import inside_island


class Block(Protocol):
    """One period of a stack's layers, a pure function."""

    def __call__(
        self, x: Float[Array, "B S E"], arrays: Any, whole: Any, shared: Any, first: Int[Array, ""], /, *states: Any
    ) -> tuple[Any, ...]:
        """The output, the states after it, and the layers' sums.

        Args:
            x: the input.
            arrays: the layers' own.
            whole: arrays of all layers of the stack, as in `StackBlock`.
            shared: arrays that all layers read.
            first: number of the first layer.
            states: in generation, what the layers hold of the tokens before (`mixers.LayerState`).
        """
        ...


class StackBlock(NamedTuple):
    """A stack's block and its arrays.

    Attributes:
        block: of one period.
        arrays: the layers' own, which lead with the count where the stack repeats.
        whole: arrays of all layers out of which a layer takes its own where they lie; constants for the gradient.
        specs: of an island in which each device runs the whole loop: of the input, the arrays and what all layers
            read; None: the caller is in one, or each block makes its own, or there is none.
    """

    block: Block
    arrays: Any
    whole: Any = ()
    specs: tuple[P, Any, Any] | None = None


def run_layers(
    plan: Sequence[LayerStack],
    blocks: Sequence[StackBlock],
    x: Float[Array, "B S E"],
    shared: Any,
    *,
    policy_of: Callable[[int], str],
) -> tuple[Float[Array, "B S E"], Sums]:
    """Run the stacks one after another: in a loop where a stack repeats, else by a plain call.

    The loop is `streamed`'s where a device runs whole layers, else `lax.scan`, which XLA splits over devices.

    Args:
        plan: the stacks.
        blocks: one a stack.
        x: the first layer's input.
        shared: arrays that all layers read; constants for the gradient.
        policy_of: number of a layer -> its policy; a stack's layers are of one.

    Returns:
        The last layer's output, and sums over the layers.
    """
    gathers = splits_weights()

    @functools.cache
    def single(block: Block, policy: str) -> Callable[..., Any]:
        """Equal layers that are called one by one are traced and lowered once, under one jit."""
        return jax.jit(checkpointed(_of_this_pass(block), policy, scanned=False, gathers=gathers))

    total: Sums = {}
    for stack, (block, arrays, whole, specs) in zip(plan, blocks, strict=True):
        policy = policy_of(stack.start)
        if stack.count == 1:
            x, sums = single(block, policy)(x, arrays, whole, shared, jnp.int32(stack.start))
        elif specs or has_streamed(arrays) or not several_devices() or (inside_island() and not offloads(policy)):
            block = checkpointed(block, policy, scanned=True, moves=False)

            def layer(x, arrays, both, repeat, block=block, stack=stack):
                return block(x, arrays, *both, stack.start + stack.period * repeat)

            def loop(x, arrays, both, layer=layer, stack=stack, policy=policy):
                return run_streamed(layer, x, arrays, both, stack.count, offload=offloads(policy))

            if specs is not None:
                rows, of_arrays, of_shared = specs
                loop = local(loop, in_specs=(rows, of_arrays, (P(), of_shared)), out_specs=(rows, P()))
            x, sums = loop(x, arrays, (whole, shared))
        else:
            block = checkpointed(block, policy, scanned=True, gathers=gathers)

            def body(x, one, block=block, whole=whole):
                arrays, first = one
                return block(x, on_device(arrays), whole, shared, first)

            firsts = stack.start + stack.period * jnp.arange(stack.count, dtype=jnp.int32)
            x, sums = jax.lax.scan(body, x, (arrays, firsts))
        total = added(total, sums if stack.count == 1 else {name: jnp.sum(each, axis=0) for name, each in sums.items()})
    return x, total


def run_steps(
    plan: Sequence[LayerStack],
    blocks: Sequence[StackBlock],
    x: Float[Array, "B S E"],
    shared: Context,
    states: Sequence[Any],
) -> tuple[Float[Array, "B S E"], list[Any]]:
    """Run the stacks on new tokens, which has no backward pass and keeps nothing for one.

    The states of a stack are carried through its loop: each layer writes its tokens' places, and nothing is copied.

    Args:
        plan: the stacks.
        blocks: as of `run_layers`.
        x: the first layer's input.
        shared: of all layers, with `slots`.
        states: of each stack.

    Returns:
        The last layer's output, and the states after it.
    """
    single = functools.cache(lambda block: jax.jit(_of_this_pass(block)))
    after = []
    for stack, (block, arrays, whole, _), state in zip(plan, blocks, states, strict=True):
        if stack.count == 1:
            x, state, _ = single(block)(x, arrays, whole, of_layer(shared, jnp.int32(0)), jnp.int32(stack.start), state)
            after.append(state)
            continue

        def body(carry: Any, one: Any, block=block, whole=whole, stack=stack) -> tuple[Any, None]:
            (x, state), (arrays, repeat) = carry, one
            first = stack.start + stack.period * repeat
            x, state, _ = block(x, on_device(arrays), whole, of_layer(shared, repeat), first, state)
            return (x, state), None

        repeats = jnp.arange(stack.count, dtype=jnp.int32)
        (x, state), _ = jax.lax.scan(body, (x, state), (arrays, repeats))
        after.append(state)
    return x, after


def _of_this_pass(block: Block) -> Callable[..., Any]:
    """The block as a function of its own: JAX keeps traces by the function, and another pass may choose otherwise."""
    return lambda *arguments: block(*arguments)
