"""Arrays put in their places on a mesh, also on one that spans processes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.parallel.mesh import batch_sharding


def row_shardings(batch: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every array of a batch, [A, B, S] or [A, B, …]: rows over `BATCH`, tokens over `context`.

    Args:
        batch: arrays, or their shapes.
        mesh: the mesh.
    """
    spec = batch_sharding(mesh).spec
    return jax.tree.map(lambda array: NamedSharding(mesh, P(*spec[: array.ndim])), batch)


def place(tree: Any, shardings: Any) -> Any:
    """Put arrays in their places; those that are there already stay.

    Args:
        tree: arrays, of NumPy or of JAX. On a mesh of several processes an array that is not on it yet is the same in
            all of them, and each takes its devices' parts.
        shardings: for every leaf a sharding.
    """
    return jax.tree.map(_place, tree, shardings)


def whole(tree: Any) -> Any:
    """Arrays of a mesh, each whole on every device.

    Args:
        tree: arrays.
    """
    shardings = jax.tree.map(lambda array: NamedSharding(array.sharding.mesh, P()), tree)
    return jax.jit(lambda arrays: arrays, out_shardings=shardings)(tree)


def _place(array: Any, sharding: jax.sharding.Sharding) -> Any:
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if sharding.is_fully_addressable or not getattr(array, "is_fully_addressable", True):
        return jax.device_put(array, sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _place(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
