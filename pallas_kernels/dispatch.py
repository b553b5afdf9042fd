"""Which implementation of an operation runs: decided by the target, never silently.

The target is the abstract device when one is set (compilation for a GPU on a machine that has none), else the device of
`jax.default_device`, else the first of the default backend. An operation lists its implementations in order of
preference, each with the reason why it cannot serve this call, or None when it can; ``select`` takes the first that
can. A forced implementation that cannot serve is an error that carries its reason: nothing downgrades behind the
caller's back.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import jax

# NVIDIA product names as `device_kind` gives them, in the order in which they are tried (GB200 before B200).
_COMPUTE_CAPABILITIES: tuple[tuple[str, tuple[int, int]], ...] = (
    (r"GB10\b", (12, 1)),
    (r"RTX PRO [0-9]+|RTX 50[0-9]0", (12, 0)),
    (r"G?B300", (10, 3)),
    (r"G?B200", (10, 0)),
    (r"GH200|H200|H100|H800|H20\b", (9, 0)),
    (r"RTX 40[0-9]0|L40S?\b|L4\b|L20\b|RTX [0-9]+ ADA|RTX [0-9]+ Ada", (8, 9)),
    (r"RTX 30[0-9]0|A10G?\b|A40\b|A16\b|A2\b|RTX A[0-9]+", (8, 6)),
    (r"A100|A800|A30\b", (8, 0)),
    (r"T4\b|RTX 20[0-9]0|Quadro RTX", (7, 5)),
    (r"V100|TITAN V", (7, 0)),
)


class Target(NamedTuple):
    """The device that the traced program will run on.

    Attributes:
        platform: "cpu", "cuda", "rocm", "tpu", …
        device_kind: the device's name as its driver gives it, for example "NVIDIA H200".
        compute_capability: CUDA compute capability, for example (9, 0); None where there is none or it is not known.
        num_cores: number of streaming multiprocessors; None where it is not known.
    """

    platform: str
    device_kind: str
    compute_capability: tuple[int, int] | None
    num_cores: int | None

    def __str__(self) -> str:
        """The target as error messages name it: "NVIDIA H200 (cuda, compute capability 9.0)"."""
        if self.compute_capability is None:
            return f"{self.device_kind} ({self.platform})"
        major, minor = self.compute_capability
        return f"{self.device_kind} ({self.platform}, compute capability {major}.{minor})"


def target() -> Target:
    """The device to plan for: the abstract device when one is set, else the default device.

    Returns:
        The target; its compute capability is None for a device whose kind is not in the table above and that is not
        present to be asked, which sends every operation to its XLA path.
    """
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.devices(chosen)[0] if chosen is None or isinstance(chosen, str) else chosen
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.device_kind != device.device_kind:
        return Target(
            _platform(abstract.platform, abstract.device_kind),
            abstract.device_kind,
            compute_capability_of(abstract.device_kind),
            abstract.num_cores,
        )
    capability = getattr(device, "compute_capability", None)
    parsed = re.fullmatch(r"(\d+)\.(\d+)", str(capability))
    return Target(
        _platform(device.platform, device.device_kind, str(capability)),
        device.device_kind,
        (int(parsed[1]), int(parsed[2])) if parsed else None,
        getattr(device, "core_count", None),
    )


def compute_capability_of(device_kind: str) -> tuple[int, int] | None:
    """The CUDA compute capability of an NVIDIA product.

    Args:
        device_kind: product name, for example "NVIDIA A100-SXM4-80GB".

    Returns:
        (major, minor), or None for a product that the table does not hold.

    References:
        https://developer.nvidia.com/cuda-gpus
    """
    for pattern, capability in _COMPUTE_CAPABILITIES:
        if re.search(rf"\b(?:{pattern})", device_kind):
            return capability
    return None


def select(op: str, implementation: str | None, candidates: Sequence[tuple[str, str | None]]) -> str:
    """Choose the implementation that serves a call.

    Args:
        op: name of the operation, for the messages.
        implementation: the one the caller forces, or None to take the first that can serve.
        candidates: (name, reason) in order of preference; reason is None for an implementation that can serve this
            call on this target, else one clause saying why it cannot.

    Returns:
        The chosen name.

    Raises:
        ValueError: the forced name is not one of the candidates.
        NotImplementedError: the forced implementation, or every one of them, cannot serve the call.
    """
    reasons = dict(candidates)
    if implementation is None:
        for name, reason in candidates:
            if reason is None:
                return name
        listed = "; ".join(f"{name}: {reason}" for name, reason in candidates)
        raise NotImplementedError(f"{op}: no implementation can serve this call ({listed})")
    if implementation not in reasons:
        names = ", ".join(repr(name) for name in reasons)
        raise ValueError(f"{op}: implementation must be None or one of {names}, got {implementation!r}")
    reason = reasons[implementation]
    if reason is not None:
        raise NotImplementedError(
            f"{op}: implementation {implementation!r} cannot serve this call: {reason} "
            "(pass implementation=None to let the target decide)"
        )
    return implementation


def _platform(platform: str, device_kind: str, capability: str = "") -> str:
    """Which of "cuda" and "rocm" a device is that only calls itself "gpu"."""
    if platform != "gpu":
        return platform
    return "rocm" if capability.startswith("gfx") or device_kind.startswith(("gfx", "AMD")) else "cuda"
