"""Gathering sharded weights where they are used.

XLA places the gathers where the compiler splits the program over the devices. In an island over `fsdp`, where a step's
devices take gradients apart, they are written out: where one process has the devices, as copies from one to another,
for which the copy engines need no multiprocessors; where several have them, as a gather of NCCL's.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fastjax.parallel.mesh import MESH_AXES, spec_of

#: Most devices among which a shard is copied to each; more gather.
_COPIES = 8
#: XLA's options of a step with copies: by the copy engines, not by a kernel of NCCL's.
COPY_OPTIONS = {"xla_gpu_use_memcpy_local_p2p": True}


def gathered(tree: Any, axes: Sequence[P]) -> Any:
    """Gather what the ambient mesh splits over `fsdp`, if anything; experts stay on their devices.

    Inside an island over `fsdp` it takes arrays with axes that `fsdp` splits for this device's shards.

    Called inside the body of the layer loop, on packed codes: 4 bits a weight travel, one layer at a time. A gradient
    leaves the body in the leaf's own shards: summed and scattered at once, it is whole on no device.

    Args:
        tree: arrays.
        axes: the logical axes of each.
    """
    if holds_shards():
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(map(_joined, leaves, axes))
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
    return _splits(inside=False)


def holds_shards() -> bool:
    """Whether the caller is in an island over `fsdp`, where weights are this device's shards."""
    return _splits(inside=True)


def split_places(names: P) -> list[int]:
    """The axes of an array that `fsdp` splits.

    Args:
        names: its logical axes.
    """
    return [place for place, name in enumerate(names) if name is not None and "fsdp" in MESH_AXES[name]]


def looked_up(shard: Float[Array, "V E"], tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """Rows of a table by number, inside an island over `fsdp`: no device gathers the table.

    Each device looks the tokens of all up in its own rows, and the sums of what all find are scattered: of the terms of
    one but one are zeros.

    Args:
        shard: this device's rows of the table.
        tokens: of this device.
    """
    place = jax.lax.all_gather(tokens, "fsdp") - jax.lax.axis_index("fsdp") * shard.shape[0]
    own = (place >= 0) & (place < shard.shape[0])
    rows = jnp.where(own[..., None], jnp.take(shard, place, axis=0, mode="clip"), 0)
    return jax.lax.psum_scatter(rows, "fsdp", scatter_dimension=0)


def everything_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps everything but gathered weights."""
    return primitive.name not in ("linear_call", "sharding_constraint")


def copies_shards(devices: int) -> bool:
    """Whether an island's gathers are copies from device to device.

    Args:
        devices: along `fsdp`.
    """
    return devices <= _COPIES and jax.process_count() == 1


def _splits(*, inside: bool) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    manual = all(kind == AxisType.Manual for kind in mesh.axis_types)
    return not mesh.empty and mesh.shape.get("fsdp", 1) > 1 and manual == inside


def _joined(shard: Array, names: P) -> Array:
    """The array of which each device has a shard, in an island; other arrays as they are."""
    places = split_places(names)
    if not places:
        return shard
    (axis,), count = places, jax.lax.axis_size("fsdp")
    if not copies_shards(count):
        return jax.lax.all_gather(shard, "fsdp", axis=axis, tiled=True)
    # In turn those of the devices behind this one; the array begins with the first device's. One pass puts them there.
    turn = [
        jax.lax.ppermute(shard, "fsdp", [((device + ahead) % count, device) for device in range(count)])
        for ahead in range(1, count)
    ]
    ring = jnp.concatenate([shard, *turn, shard, *turn[:-1]], axis)
    first = (count - jax.lax.axis_index("fsdp")) % count * shard.shape[axis]
    return jax.lax.dynamic_slice_in_dim(ring, first, count * shard.shape[axis], axis)


def _whole(leaf: Array, spec: P, rest: P) -> Array:
    def gather(_: None, leaf: Array) -> Array:
        return jax.lax.with_sharding_constraint(leaf, rest)

    def scatter(_: None, gradient: Array) -> Array:
        return jax.lax.with_sharding_constraint(gradient, spec)

    return linear_call(gather, scatter, None, leaf)
