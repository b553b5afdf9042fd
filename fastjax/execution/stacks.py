"""Layers as stacks: which of them share a traced body, and their trees in this arrangement."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.execution.streamed import layer_at
from fastjax.models.layout import LayerStack


def plan_layers(signatures: Sequence[Hashable], *, scans: bool) -> tuple[LayerStack, ...]:
    """Split the layers into stacks.

    Args:
        signatures: one a layer; equal for layers of equal structure (formats, shapes, adapters).
        scans: prefix, period × n, remainder, the longest repetition from each position on, of periods up to 8; without
            it every layer is by itself.
    """
    stacks, position, total = [], 0, len(signatures)
    while position < total:
        best = LayerStack(position, 1, 1)
        for period in range(1, 9) if scans else ():
            unit, count = signatures[position : position + period], 1
            while signatures[position + count * period : position + (count + 1) * period] == unit:
                count += 1
            if count > 1 and period * count > best.period * best.count:
                best = LayerStack(position, period, count)
        stacks.append(best)
        position += best.period * best.count
    return tuple(stacks)


def located(plan: Sequence[LayerStack], index: int) -> tuple[int, int, int]:
    """A layer's stack by number, its position in the period, and the number of the period."""
    for number, stack in enumerate(plan):
        offset = index - stack.start
        if 0 <= offset < stack.period * stack.count:
            return number, offset % stack.period, offset // stack.period
    raise IndexError(f"layer {index} is in no stack of {list(plan)}")


def layer_of(stacks: Sequence[Sequence[Any]], plan: Sequence[LayerStack], index: int) -> Any:
    """Layer `index` out of the stacks' trees, by itself."""
    number, position, repeat = located(plan, index)
    tree = stacks[number][position]
    return tree if plan[number].count == 1 else layer_at(tree, repeat)


def arrange(layers: Sequence[Any], plan: Sequence[LayerStack]) -> list[list[Any]]:
    """Trees of single layers, arranged as the plan's stacks: those that repeat lead with a new axis."""

    def tree(stack: LayerStack, position: int) -> Any:
        members = [layers[stack.start + position + n * stack.period] for n in range(stack.count)]
        return members[0] if stack.count == 1 else _stacked(members)

    return [[tree(stack, position) for position in range(stack.period)] for stack in plan]


def rearrange(stacks: Sequence[Sequence[Any]], old: Sequence[LayerStack], new: Sequence[LayerStack]) -> list[list[Any]]:
    """Stacks of one plan as those of another; the same arrays where the plans agree."""
    if tuple(old) == tuple(new):
        return [list(run) for run in stacks]
    total = sum(run.period * run.count for run in old)
    return arrange([layer_of(stacks, old, index) for index in range(total)], new)


@jax.jit
def _stacked(members: Sequence[Any]) -> Any:
    """Equal trees as one, by one program: one for each array would be compiled for seconds in all."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
