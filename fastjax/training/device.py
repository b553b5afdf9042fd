"""The device of a run, and why the others are idle."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax


class DeviceUse(NamedTuple):
    """A run's device, for people.

    Attributes:
        used: its kind, number, and the number of devices.
        idle: the others, the reason, and how to choose another; None: there are no others.
    """

    used: str
    idle: str | None


def device_use(devices: Sequence[Any] | None = None) -> DeviceUse:
    """Describe a run's device, JAX's first.

    Args:
        devices: None: `jax.devices()`.
    """
    first, *others = jax.devices() if devices is None else devices
    if not others:
        return DeviceUse(first.device_kind, None)
    choice = " (CUDA_VISIBLE_DEVICES chooses which one)" if first.platform == "gpu" else ""
    listed = f"device {others[0].id}" if len(others) == 1 else f"devices {others[0].id} to {others[-1].id}"
    return DeviceUse(
        f"{first.device_kind} (device {first.id}, 1 of {len(others) + 1})",
        f"{listed} of {len(others) + 1}, since a run trains on one device{choice}",
    )
