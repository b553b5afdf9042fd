"""Islands: shard_map regions in which a kernel sees its own device's part of the arrays.

XLA cannot split a custom kernel over devices: it would gather the operands and compute everything everywhere. Inside an
island each device calls the kernel on its own rows.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

#: Mesh axes over which the batch is split, and over which its rows' tokens are.
BATCH = ("data", "fsdp", "expert")
CONTEXT = "context"
#: The axis over which heads and features are split in the layers, and rows or their tokens everywhere else.
TENSOR = "tensor"
#: Arrays [B, S, …] whose rows and tokens are split (whole rows on devices along `tensor`: `rows_split`), and sums over
#: its own tokens that each device leads with an axis of one for.
ROWS = P(BATCH, (CONTEXT, TENSOR))
SHARES = P((*BATCH, CONTEXT, TENSOR))
#: Kernels that read other devices' memory are lowered for these by number, and the ambient mesh may be abstract.
_DEVICES: ContextVar[Mesh | None] = ContextVar("devices", default=None)


@contextlib.contextmanager
def islands_on(mesh: Mesh) -> Iterator[None]:
    """Trace islands for the devices of a mesh, which is the ambient one too.

    Args:
        mesh: of devices, there or to be compiled for.
    """
    token = _DEVICES.set(mesh)
    try:
        yield
    finally:
        _DEVICES.reset(token)


def knows_devices() -> bool:
    """Whether the caller is traced for a mesh's devices by number, so that its kernels can read their memory.

    Mosaic takes devices in the order of their numbers alone.
    """
    mesh = _DEVICES.get()
    return mesh is not None and np.array_equal(mesh.device_ids.ravel(), np.arange(mesh.size))


def local(op: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Run an operation on each device's own part of its arguments.

    Args:
        op: arrays in, arrays out; differentiable if the island is to be.
        in_specs: a PartitionSpec for each argument (a prefix tree), in terms of the ambient mesh's axes.
        out_specs: a PartitionSpec for each result.

    Returns:
        `op` itself where the ambient mesh (`jax.set_mesh`) has one device or none, or where the caller is already
        inside an island; else `op` in a shard_map over the ambient mesh.
    """
    if not several_devices() or inside_island():
        return op
    ambient = jax.sharding.get_abstract_mesh()

    def placed(spec: P) -> P:
        return P(*(on_axes(part, ambient) for part in spec))

    in_specs, out_specs = jax.tree.map(placed, (in_specs, out_specs), is_leaf=lambda s: isinstance(s, P))
    return jax.shard_map(op, mesh=_DEVICES.get(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def several_devices() -> bool:
    """Whether the ambient mesh has several devices, inside an island too."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def inside_island() -> bool:
    """Whether the caller is in an island over all axes of the ambient mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and all(kind == AxisType.Manual for kind in mesh.axis_types)


def devices_along(axis: str) -> int:
    """The number of devices of the ambient mesh along an axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(axis, 1)


def batch_devices() -> int:
    """The number of devices over which the ambient mesh splits the batch that the caller sees."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return math.prod(mesh.shape[name] for name in BATCH if kinds.get(name, AxisType.Manual) != AxisType.Manual)


def batch_part() -> jax.Array:
    """The index of this device's part of the batch, inside an island; int32 []."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = tuple(name for name in BATCH if kinds.get(name) == AxisType.Manual)
    return jax.lax.axis_index(names) if names else jnp.int32(0)


def on_axes(names: str | tuple[str, ...] | None, mesh: Any) -> tuple[str, ...] | None:
    """An entry of a PartitionSpec without the axes that split nothing.

    Args:
        names: of mesh axes.
        mesh: the mesh, or its abstract.
    """
    names = () if names is None else (names,) if isinstance(names, str) else names
    return tuple(name for name in names if mesh.shape.get(name, 1) > 1) or None
