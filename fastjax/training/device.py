"""The devices of a run, and why the others are idle."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fastjax.parallel import MeshShape


class DeviceUse(NamedTuple):
    """A run's devices, for people.

    Attributes:
        used: their kind, and their mesh or number.
        idle: the others, the reason, and how to choose; None: there are no others.
    """

    used: str
    idle: str | None


def device_use(shape: MeshShape, devices: Sequence[Any] | None = None) -> DeviceUse:
    """Describe a run's devices, JAX's first.

    Args:
        shape: of the mesh.
        devices: None: `jax.devices()`.
    """
    devices = jax.devices() if devices is None else devices
    first, others = devices[0], devices[shape.size :]
    used = first.device_kind if shape.size == 1 else f"{shape.size} × {first.device_kind} ({shape})"
    if not others:
        return DeviceUse(used, None)
    if shape.size == 1:
        used += f" (device {first.id}, 1 of {len(devices)})"
    choice = ", and CUDA_VISIBLE_DEVICES chooses which" if first.platform == "gpu" else ""
    listed = f"device {others[0].id}" if len(others) == 1 else f"devices {others[0].id} to {others[-1].id}"
    return DeviceUse(used, f"{listed} of {len(devices)}, since the settings (parallel) take {shape.size}{choice}")
