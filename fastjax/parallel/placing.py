"""Arrays put in their places on a mesh, also on one that spans processes."""

from typing import Any

import jax
import jax.numpy as jnp


def place(tree: Any, shardings: Any) -> Any:
    """Put arrays in their places; those that are there already stay.

    Args:
        tree: arrays, of NumPy or of JAX. On a mesh of several processes an array that is not on it yet is the same in
            all of them, and each takes its devices' parts.
        shardings: for every leaf a sharding.
    """
    return jax.tree.map(_place, tree, shardings)


def _place(array: Any, sharding: jax.sharding.Sharding) -> Any:
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if sharding.is_fully_addressable or not getattr(array, "is_fully_addressable", True):
        return jax.device_put(array, sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _place(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
