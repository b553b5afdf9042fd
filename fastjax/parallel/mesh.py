"""The mesh and the one table of where arrays live on it.

Axes: `data` splits the batch and repeats the weights; `fsdp` splits the batch and the frozen weights (by output rows,
so that packed codes travel packed). Trainable arrays and the optimizer's state are repeated.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.errors import ConfigError
from fastjax.parallel.islands import BATCH

#: Words in the path of a leaf that is a vector a layer.
VECTORS = ("bias", "norm", "nested_", "quant_map")


def make_mesh(data: int = 1, fsdp: int = 1, devices: list[Any] | None = None) -> Mesh:
    """A mesh of data × fsdp devices.

    Args:
        data: replicas.
        fsdp: devices that share one copy of the frozen weights.
        devices: the first data × fsdp of these; default: of `jax.devices()`.

    Raises:
        ConfigError: more devices asked for than there are.
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or fsdp < 1 or data * fsdp > len(devices):
        raise ConfigError(f"mesh: data {data} × fsdp {fsdp} needs {data * fsdp} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices[: data * fsdp]).reshape(data, fsdp), BATCH, axis_types=(AxisType.Auto,) * 2)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For the arrays [A, B, S] of a batch: rows over all devices."""
    return NamedSharding(mesh, P(None, BATCH, None))


def shard_replicated(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding that repeats it, for every leaf."""
    return jax.tree.map(lambda _: NamedSharding(mesh, P()), tree)


def shard_frozen(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of the frozen tree.

    A matrix whose output rows (the next-to-last axis, after any axis of stacked layers) are a multiple of the fsdp size
    is split there; the others are repeated, and so are norms, biases and the few nested scales, which are recognised by
    their path because a stacked vector has two dimensions as well.
    """
    size = mesh.shape["fsdp"]

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        vector = leaf.ndim < 2 or any(word in jax.tree_util.keystr(path) for word in VECTORS)
        if size == 1 or vector or leaf.shape[-2] % size or leaf.shape[-2] < 8 * size:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*([None] * (leaf.ndim - 2)), "fsdp", None))

    return jax.tree_util.tree_map_with_path(place, tree)
