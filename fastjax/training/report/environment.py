"""The environment of a run: versions, devices, the machine, the state of the code."""

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax

from fastjax.parallel import MeshShape
from fastjax.training.device import device_use

_DRIVER = Path("/proc/driver/nvidia/version")
#: Devices whose peaks are told one by one.
_LISTED = 8


def describe_environment(shape: MeshShape) -> dict[str, str]:
    """The known facts of a run's environment.

    Args:
        shape: of its mesh.

    Returns:
        Label → value, in the order of the report.
    """
    device = device_use(shape)
    facts = {
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "device": device.used,
        "idle devices": device.idle,
        "device memory": _device_memory(),
        "NVIDIA driver": _driver(),
        "host": f"{platform.node()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "processes": str(jax.process_count()) if jax.process_count() > 1 else None,
        "Python": platform.python_version(),
    }
    for package in (
        "fastjax",
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "flax",
        "optax",
        "tensorstore",
        "transformers",
    ):
        facts[package] = _version(package)
    facts["git commit"] = _commit()
    return {what: value for what, value in facts.items() if value}


def describe_peaks(peaks: Sequence[int]) -> str:
    """The peak memory of a run's devices in words; of many the least and the most.

    Args:
        peaks: bytes, by device, or by process where there are several.
    """
    if len(peaks) <= _LISTED:
        return ", ".join(f"{peak / 2**30:.1f}" for peak in peaks) + " GiB"
    least, most = min(peaks), max(peaks)
    return f"{least / 2**30:.1f} to {most / 2**30:.1f} GiB, most on number {peaks.index(most)} of 0 to {len(peaks) - 1}"


def _device_memory() -> str | None:
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return f"{limit / 2**30:.1f} GiB for JAX" if limit else None


def _driver() -> str | None:
    """The kernel module's version, read without a library."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[1] if match else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the current folder, with "+ changes" for a modified tree."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= + changes"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
