"""The kernels of a profiler's trace."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax


class Kernel(NamedTuple):
    """One run of a kernel, or one copy.

    Attributes:
        device: name of its plane, such as "/device:GPU:0".
        name: its own.
        module: the compiled program's, such as "jit_step".
        start: in nanoseconds.
        end: in nanoseconds.
    """

    device: str
    name: str
    module: str
    start: float
    end: float


def read_kernels(folder: Path) -> list[Kernel]:
    """Every kernel of the newest trace in a folder, in the order of their starts; none where the device is no GPU.

    Args:
        folder: of `jax.profiler.trace`.
    """
    file = max(folder.rglob("*.xplane.pb"))  # their folders are named by the time
    kernels = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader's own types are not quite Python's
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    facts = dict(event.stats)
                    module, end = str(facts.get("hlo_module", "")), event.start_ns + event.duration_ns
                    kernels.append(Kernel(plane.name, event.name, module, event.start_ns, end))
    return sorted(kernels, key=lambda kernel: kernel.start)


def busy_ns(kernels: Iterable[Kernel]) -> float:
    """Nanoseconds in which at least one of a device's kernels runs.

    Args:
        kernels: in the order of their starts.
    """
    total, end = 0.0, 0.0
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.start, end))
        end = max(end, kernel.end)
    return total
