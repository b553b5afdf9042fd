"""Several GPUs: the mesh, where arrays live on it, and islands for kernels."""

from fastjax.parallel.islands import BATCH, CONTEXT, batch_devices, batch_part, local
from fastjax.parallel.mesh import MeshShape, as_input, batch_sharding, make_mesh, shard_frozen, shard_replicated
from fastjax.parallel.placing import place

__all__ = [
    "BATCH",
    "CONTEXT",
    "MeshShape",
    "as_input",
    "batch_devices",
    "batch_part",
    "batch_sharding",
    "local",
    "make_mesh",
    "place",
    "shard_frozen",
    "shard_replicated",
]
