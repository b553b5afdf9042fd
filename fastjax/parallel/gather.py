"""Gathering sharded weights where they are used."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fastjax.parallel.mesh import spec_of
from fastjax.residuals import GATHERED


def gathered(tree: Any, axes: Sequence[P]) -> Any:
    """Gather the leaves on every device if the ambient mesh splits weights over `fsdp`; else return the tree.

    Called inside the body of the layer loop, on packed codes: 4 bits a weight travel, one layer at a time. A gradient
    leaves the body in the leaf's own shards: summed and scattered at once, it is whole on no device. No policy of
    rematerialisation keeps what was gathered.

    Args:
        tree: arrays.
        axes: the logical axes of each.
    """
    if not splits_weights():
        return tree
    mesh = jax.sharding.get_abstract_mesh()

    def whole(leaf: Array, names: P) -> Array:
        spec = spec_of(leaf.shape, names, mesh)
        if not any(spec):
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return checkpoint_name(jax.lax.with_sharding_constraint(leaf, P()), GATHERED)
        return checkpoint_name(_whole(leaf, spec), GATHERED)

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _whole(leaf: Array, spec: P) -> Array:
    return jax.lax.with_sharding_constraint(leaf, P())


_whole.defvjp(
    lambda leaf, spec: (_whole(leaf, spec), None),
    lambda spec, _, gradient: (jax.lax.with_sharding_constraint(gradient, spec),),
)
