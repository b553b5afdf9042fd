"""Gathering sharded weights where they are used.

XLA places the gathers where the compiler splits the program over the devices. In an island over `fsdp`, where a step's
devices take gradients apart, they are written out (`pallas_kernels.shard_gather`): there each device reads a layer from
the others' memory where it can.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fastjax.parallel.mesh import MESH_AXES, spec_of
from pallas_kernels import shard_gather


def gathered(tree: Any, axes: Sequence[P], after: Array, in_place: Sequence[bool] = (), *, stays: bool = True) -> Any:
    """Gather what the ambient mesh splits over `fsdp`, if anything; experts stay on their devices.

    Inside an island over `fsdp` it takes arrays with axes that `fsdp` splits for this device's shards.

    Called inside the body of the layer loop, on packed codes: 4 bits a weight travel, one layer at a time. A gradient
    leaves the body in the leaf's own shards: summed and scattered at once, it is whole on no device.

    Args:
        tree: arrays.
        axes: the logical axes of each.
        after: an island gathers nothing before this is there, and the devices have met.
        in_place: as for `take_shards`.
        stays: whether the arrays stay in memory until all devices have read them. A slice of a stack does not: in an
            island a collective gathers it.
    """
    if holds_shards():
        rest, shards = take_shards(tree, axes, in_place if stays else ())
        one = shards._replace(stacks=[shard[None] for shard in shards.stacks])
        return completed(rest, one, jnp.int32(0), after, implementation=None if stays else "xla")
    if not splits_weights():
        return tree
    mesh = jax.sharding.get_abstract_mesh()

    def whole(leaf: Array, names: P) -> Array:
        spec = spec_of(leaf.shape, names, mesh)
        rest = P(*map(_without_fsdp, spec))
        if rest == spec:
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.lax.with_sharding_constraint(leaf, rest)
        return _whole(leaf, spec, rest)

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(whole, leaves, axes))


class Shards(NamedTuple):
    """The arrays of a stack that `fsdp` splits, on one device.

    Attributes:
        stacks: this device's rows of all layers.
        split: of each array of a layer, whether it is one of them.
        in_place: of each of them, whether its readers take it where it lies.
        structure: of a layer's arrays.
    """

    stacks: Sequence[Array]
    split: Sequence[bool]
    in_place: Sequence[bool]
    structure: Any


def take_shards(tree: Any, axes: Sequence[P], in_place: Sequence[bool] = ()) -> tuple[list[Array], Shards]:
    """A stack's arrays in an island over `fsdp`: those that are whole, and the shards.

    A loop over the layers slices the former; `completed` reads a layer of the latter where they are.

    Args:
        tree: arrays that lead with the layers' axis.
        axes: the logical axes of each behind it.
        in_place: of each, whether its readers take it as `shard_gather.Shared`; empty: of none.
    """
    leaves, structure = jax.tree.flatten(tree)
    split = [is_split(names) for names in axes]
    rest = [leaf for leaf, here in zip(leaves, split, strict=True) if not here]
    stacks, places = itertools.compress(leaves, split), itertools.compress(in_place or [False] * len(leaves), split)
    return rest, Shards(list(stacks), split, list(places), structure)


def completed(
    rest: Sequence[Array], shards: Shards, layer: Int[Array, ""], after: Array, *, implementation: str | None = None
) -> Any:
    """One layer's arrays of those that `take_shards` gave: gathered, or `Shared` for their readers.

    Args:
        rest: this layer's arrays that are whole.
        shards: of all layers.
        layer: its place in the stacks.
        after: as for `gathered`.
        implementation: of `shard_gather.gather`.
    """
    # Where devices read one another's memory they have met first: what `after` is depends on a collective of the step,
    # which a device whose weights are not there yet has not entered.
    bits = jax.lax.bitcast_convert_type(after.ravel()[0].astype(jnp.bfloat16), jnp.uint16)
    layer = layer + (bits.astype(jnp.int32) >> 16)  # of 16 bits none is left: 0, and not before `after`
    gone = [stack for stack, there in zip(shards.stacks, shards.in_place, strict=True) if not there]
    gathered_arrays = iter(shard_gather.gather(gone, layer, "fsdp", implementation=implementation))
    devices = jax.lax.axis_size("fsdp")
    pieces = (
        shard_gather.Shared(stack, layer, "fsdp", devices) if there else next(gathered_arrays)
        for stack, there in zip(shards.stacks, shards.in_place, strict=True)
    )
    others = iter(rest)
    return shards.structure.unflatten([next(pieces if here else others) for here in shards.split])


def scattered(gradients: Any, axes: Any) -> Any:
    """Gradients in the shards of their weights, if the ambient mesh splits weights; else as they are.

    Args:
        gradients: arrays.
        axes: their logical axes, as `shard_frozen` takes them.
    """
    if not splits_weights():
        return gradients
    mesh = jax.sharding.get_abstract_mesh()
    return jax.tree.map(
        lambda leaf, names: jax.lax.with_sharding_constraint(leaf, spec_of(leaf.shape, names, mesh)), gradients, axes
    )


def splits_weights() -> bool:
    """Whether the ambient mesh splits weights over `fsdp`, outside of islands."""
    return _splits(inside=False)


def holds_shards() -> bool:
    """Whether the caller is in an island over `fsdp`, where weights are this device's shards."""
    return _splits(inside=True)


def is_split(names: P) -> bool:
    """Whether `fsdp` splits an array: of what an island gathers, its rows.

    Args:
        names: its logical axes.
    """
    return any("fsdp" in MESH_AXES[name] for name in names if name is not None)


def looked_up(shard: Float[Array, "V E"], tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """Rows of a table by number, inside an island over `fsdp`: no device gathers the table.

    Each device looks the tokens of all up in its own rows, and the sums of what all find are scattered: of the terms of
    one but one are zeros.

    Args:
        shard: this device's rows of the table.
        tokens: of this device.
    """
    row = jax.lax.all_gather(tokens, "fsdp") - jax.lax.axis_index("fsdp") * shard.shape[0]
    here = (row >= 0) & (row < shard.shape[0])
    rows = jnp.where(here[..., None], jnp.take(shard, row, axis=0, mode="clip"), 0)
    return jax.lax.psum_scatter(rows, "fsdp", scatter_dimension=0)


def everything_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps everything but gathered weights."""
    return primitive.name not in ("linear_call", "sharding_constraint")


def _splits(*, inside: bool) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    manual = all(kind == AxisType.Manual for kind in mesh.axis_types)
    return not mesh.empty and mesh.shape.get("fsdp", 1) > 1 and manual == inside


def _without_fsdp(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    if not isinstance(axes, tuple):
        return None if axes == "fsdp" else axes
    first, *others = (axis for axis in axes if axis != "fsdp")
    return (first, *others) if others else first


def _whole(leaf: Array, spec: P, rest: P) -> Array:
    def gather(_: None, leaf: Array) -> Array:
        return jax.lax.with_sharding_constraint(leaf, rest)

    def scatter(_: None, gradient: Array) -> Array:
        return jax.lax.with_sharding_constraint(gradient, spec)

    return linear_call(gather, scatter, None, leaf)
