"""Arrays put in their places on a mesh, also on one that spans processes."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int64

from fastjax.parallel.mesh import batch_sharding


def row_shardings(batch: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every array of a batch, [A, B, S] or [A, B, …]: rows over `BATCH`, tokens over `context`.

    Args:
        batch: arrays, or their shapes.
        mesh: the mesh.
    """
    spec = batch_sharding(mesh).spec
    return jax.tree.map(lambda array: NamedSharding(mesh, P(*spec[: array.ndim])), batch)


def own_rows(mesh: Mesh, rows: int, devices: Collection[Any] | None = None) -> Int64[np.ndarray, " _"]:
    """The rows of a batch that devices of a process take.

    Args:
        mesh: the mesh.
        rows: of a microbatch.
        devices: of the process; None: this one's.
    """
    here = set(jax.local_devices() if devices is None else devices)
    places = batch_sharding(mesh).devices_indices_map((1, rows))
    parts = [np.arange(rows)[index[1]] for device, index in places.items() if device in here]
    return np.unique(np.concatenate(parts))


def place(tree: Any, shardings: Any) -> Any:
    """Put arrays in their places; those that are there already stay.

    Args:
        tree: arrays, of NumPy or of JAX. On a mesh of several processes each takes its devices' parts of an array that
            is not on it yet; the others' may hold anything there.
        shardings: for every leaf a sharding.
    """
    return jax.tree.map(_place, tree, shardings)


def spans_processes(tree: Any) -> bool:
    """Whether parts of some array lie on devices of other processes.

    Args:
        tree: arrays, of NumPy or of JAX.
    """
    return not all(getattr(array, "is_fully_addressable", True) for array in jax.tree.leaves(tree))


def fetched(array: Any, keep: bool = True) -> np.ndarray | None:
    """An array in the memory of the host.

    Args:
        array: of NumPy or of JAX. Of one that spans processes each device gets a copy: all processes must call this.
        keep: whether it is wanted here; otherwise there is None.
    """
    if spans_processes(array):
        if not array.is_fully_replicated:
            array = _placed(NamedSharding(array.sharding.mesh, P()))(array)
        if not keep:  # a process that ran ahead would hold all that the others have not fetched yet
            jax.block_until_ready(array)
    return np.asarray(array) if keep else None


def _place(array: Any, sharding: jax.sharding.Sharding) -> Any:
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if sharding.is_fully_addressable or not getattr(array, "is_fully_addressable", True):
        return jax.device_put(array, sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _place(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@functools.cache
def _placed(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)
