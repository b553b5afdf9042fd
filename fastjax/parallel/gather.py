"""Gathering sharded weights where they are used."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fastjax.parallel.mesh import spec_of


def gathered(tree: Any, axes: Sequence[P]) -> Any:
    """Gather what the ambient mesh splits over `fsdp`, if anything; experts stay on their devices.

    Called inside the body of the layer loop, on packed codes: 4 bits a weight travel, one layer at a time. A gradient
    leaves the body in the leaf's own shards: summed and scattered at once, it is whole on no device.

    Args:
        tree: arrays.
        axes: the logical axes of each.
    """
    if not splits_weights():
        return tree
    mesh = jax.sharding.get_abstract_mesh()

    def whole(leaf: Array, names: P) -> Array:
        spec = spec_of(leaf.shape, names, mesh)
        rest = P(*(None if axis == "fsdp" else axis for axis in spec))
        if rest == spec:
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.lax.with_sharding_constraint(leaf, rest)
        return _whole(leaf, spec, rest)

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(whole, leaves, axes))


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
    mesh = jax.sharding.get_abstract_mesh()
    inside = all(kind == AxisType.Manual for kind in mesh.axis_types)
    return not mesh.empty and mesh.shape.get("fsdp", 1) > 1 and not inside


def everything_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps everything but gathered weights."""
    return primitive.name not in ("linear_call", "sharding_constraint")


def _whole(leaf: Array, spec: P, rest: P) -> Array:
    def gather(_: None, leaf: Array) -> Array:
        return jax.lax.with_sharding_constraint(leaf, rest)

    def scatter(_: None, gradient: Array) -> Array:
        return jax.lax.with_sharding_constraint(gradient, spec)

    return linear_call(gather, scatter, None, leaf)
