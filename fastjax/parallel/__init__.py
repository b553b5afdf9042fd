"""Several GPUs: the mesh, where arrays live on it, and islands for kernels."""

from fastjax.parallel.checks import check_mesh
from fastjax.parallel.context import context_devices, in_order, own_tokens
from fastjax.parallel.islands import (
    BATCH,
    CONTEXT,
    ROWS,
    SHARES,
    TENSOR,
    batch_devices,
    batch_part,
    local,
    several_devices,
)
from fastjax.parallel.mesh import MeshShape, as_input, batch_sharding, make_mesh, shard_frozen
from fastjax.parallel.placing import place, row_shardings
from fastjax.parallel.tensor import all_tokens, own_sums, rows_split, split_axis, tensor_devices

__all__ = [
    "BATCH",
    "CONTEXT",
    "ROWS",
    "SHARES",
    "TENSOR",
    "MeshShape",
    "all_tokens",
    "as_input",
    "batch_devices",
    "batch_part",
    "batch_sharding",
    "check_mesh",
    "context_devices",
    "in_order",
    "local",
    "make_mesh",
    "own_sums",
    "own_tokens",
    "place",
    "row_shardings",
    "rows_split",
    "several_devices",
    "shard_frozen",
    "split_axis",
    "tensor_devices",
]
