"""Several GPUs: the mesh, where arrays live on it, and islands for kernels."""

from fastjax.parallel.checks import check_mesh
from fastjax.parallel.islands import BATCH, CONTEXT, batch_devices, batch_part, local
from fastjax.parallel.mesh import MeshShape, as_input, batch_sharding, make_mesh, shard_frozen, shard_replicated

__all__ = [
    "BATCH",
    "CONTEXT",
    "MeshShape",
    "as_input",
    "batch_devices",
    "batch_part",
    "batch_sharding",
    "check_mesh",
    "local",
    "make_mesh",
    "shard_frozen",
    "shard_replicated",
]
