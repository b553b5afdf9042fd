"""Several GPUs: the mesh, where arrays live on it, and islands for kernels."""

from fastjax.parallel.checks import check_mesh
from fastjax.parallel.islands import (
    BATCH,
    CONTEXT,
    ROWS,
    SHARES,
    TENSOR,
    batch_devices,
    batch_part,
    devices_along,
    local,
    several_devices,
)
from fastjax.parallel.mesh import MeshShape, as_input, batch_sharding, make_mesh, shard_frozen
from fastjax.parallel.placing import place, row_shardings
from fastjax.parallel.tokens import all_tokens, in_order, own_sums, own_tokens, rows_split, split_axis

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
    "devices_along",
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
]
