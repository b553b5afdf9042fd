"""Blocks: the layers of a period of a stack as a pure function, through the transforms of an execution.

A block is a composition: arrays, gathered from other devices -> layers, with chunks and across the devices of a row ->
the pass through them, on this device's part of the heads and features where several share a layer.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fastjax.execution.chunks import Chunk, chunk_size, feed_by_chunks
from fastjax.execution.loop import Block, StackBlock
from fastjax.execution.policies import offloads
from fastjax.execution.streamed import has_streamed
from fastjax.execution.tensor_parts import (
    TensorAxes,
    are_apart,
    copied,
    layers_on_parts,
    own_part,
    part_specs,
    tensor_axes,
)
from fastjax.models.decoder import Decoder
from fastjax.models.layout import LayerStack, logical_axes
from fastjax.parallel import CONTEXT, TENSOR, devices_along, split_axis
from fastjax.parallel.gather import Shards, completed, gathered, holds_shards, take_shards
from fastjax.parallel.islands import inside_island
from fastjax.quantization import read_in_place

#: (layers, x, context, number of the first, *states) -> a block's result.
Pass = Callable[..., Any]


class Transforms(NamedTuple):
    """The transforms of the layers of a stack, hashable.

    Attributes:
        gather: logical axes of their arrays, for what comes from other devices (`gathered`); None: these come whole.
        stays: whether these arrays are no slices of a stack.
        shared: what several devices along `tensor` split; None: there is one.
        split: the axis over which the tokens of the batch lie on them.
        chunk: tokens of a row that an MLP takes at once; None: all.
        across: the mesh axis along which a row's tokens lie; None: none.
    """

    gather: tuple[P, ...] | None
    stays: bool
    shared: TensorAxes | None
    split: int
    chunk: int | None
    across: str | None


def stack_blocks(
    model: Decoder, x: Float[Array, "B S E"], run: Pass, policy_of: Callable[[int], str], chunk: Chunk
) -> list[StackBlock]:
    """Block and arrays of each stack of layers, for a loop over them.

    Args:
        model: the decoder.
        x: embeddings.
        run: the pass through the layers.
        policy_of: number of a layer -> its policy.
        chunk: tokens that an MLP computes at a time.
    """
    # Equal stacks share a function, but for this pass alone: another may be traced with other implementations.
    block_of, blocks = functools.cache(functools.partial(_block_of, run)), []
    shared = tensor_axes(model.config) if devices_along(TENSOR) > 1 else None
    across = CONTEXT if devices_along(CONTEXT) > 1 else None
    for number, (layers, stack) in enumerate(zip(model.layers, model.plan, strict=True)):
        graphdef, variables = nnx.split(layers)
        arrays = nnx.to_pure_dict(variables)
        names = jax.tree.leaves(logical_axes({"layers": {number: arrays}}, model.config))
        axes = tuple(P(*each[stack.count > 1 :]) for each in names)
        policy = policy_of(stack.start)
        how = Transforms(
            axes, stack.count == 1, shared, split_axis(x.shape[0]), chunk_size(chunk, x.shape, policy), across
        )
        looped = stack.count > 1 and not offloads(policy) and not has_streamed(arrays)
        if shared is not None:
            whole = looped and devices_along("fsdp") == 1 and are_apart(layers)
            arrays = copied(arrays, shared, stacked=stack.count > 1)
            specs = part_specs(arrays, shared, x.shape[0], stacked=True) if whole else None
            blocks.append(StackBlock(block_of(graphdef, how), arrays, specs=specs))
        elif holds_shards() and looped:
            arrays, shards = take_shards(arrays, axes, read_in_place(arrays))
            block = block_of(graphdef, how._replace(gather=None))
            blocks.append(StackBlock(_with_shards(block, stack, shards), arrays, shards.stacks))
        else:
            blocks.append(StackBlock(block_of(graphdef, how), arrays))
    return blocks


def _block_of(run: Pass, graphdef: nnx.GraphDef, how: Transforms) -> Block:
    """The block function of stacks of equal layers.

    Args:
        run: the pass through the layers.
        graphdef: of one period's layers.
        how: the transforms.
    """

    def block(x, arrays, _, shared, first, *states):
        if how.gather is not None and how.shared is None:
            arrays = gathered(arrays, how.gather, x, read_in_place(arrays), stays=how.stays)
        layers = nnx.merge(graphdef, arrays)
        for layer in layers:
            layer.mixer.across = how.across
            if how.chunk is not None:
                layer.feed = functools.partial(feed_by_chunks, how.chunk)
        if how.shared is not None and inside_island():
            return own_part(run, layers, how.split, x, shared, first, *states)
        if how.shared is not None:
            return layers_on_parts(run, layers, how.shared, x, shared, first, *states)
        return run(layers, x, shared, first, *states)

    return block


def _with_shards(block: Block, stack: LayerStack, shards: Shards) -> Block:
    """A block that gathers the shards that `take_shards` took, out of whole stacks: nobody copies a layer's.

    Args:
        block: of whole arrays.
        stack: its layers.
        shards: of all of them; their stacks come as the block's `whole`.
    """

    def complete(x, arrays, whole, shared, first, *states):
        layer = (first - stack.start) // stack.period
        arrays = completed(arrays, shards._replace(stacks=whole), layer, x)
        return block(x, arrays, (), shared, first, *states)

    return complete
