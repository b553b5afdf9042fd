"""Choice of the implementation of an operation: by target and call, never silently.

The target is the abstract device when one is set (compilation for a GPU on a machine that has none), else the device of
`jax.default_device`, else the first of the default backend. An operation with several implementations has one
`Registry`: what each implementation needs, and their order of preference. The first that can serve a call is taken. A
forced implementation that cannot serve is an error that carries its reason: nothing downgrades behind the caller's
back. An operation with one implementation calls it.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import compat
from pallas_kernels.cards import compute_capability_of


class Target(NamedTuple):
    """The device of the traced program.

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
        """For messages: "NVIDIA H200 (cuda, compute capability 9.0)"."""
        if self.compute_capability is None:
            return f"{self.device_kind} ({self.platform})"
        major, minor = self.compute_capability
        return f"{self.device_kind} ({self.platform}, compute capability {major}.{minor})"

    def lacks(self, capability: tuple[int, int], *, exactly: bool = False, what: str = "it") -> str | None:
        """Why the device is no NVIDIA GPU of a compute capability, as a clause of `Implementation.why_not`; or None.

        Args:
            capability: the least, (major, minor).
            exactly: whether newer GPUs do not serve either, as for instructions of one architecture.
            what: subject of the clause.
        """
        own = self.compute_capability if self.platform == "cuda" else None
        if own is not None and (own == capability or (own > capability and not exactly)):
            return None
        wanted = f"{capability[0]}.{capability[1]}{'' if exactly else ' or more'}"
        return f"{what} needs an NVIDIA GPU of compute capability {wanted}, the target is {self}"


def target() -> Target:
    """The device to plan for: the abstract device when one is set, else the default device.

    Returns:
        The target. The compute capability of an abstract device is that of `cards`, None for an unknown kind:
        every operation then takes its XLA path.
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


def compute_capability() -> tuple[int, int]:
    """The compute capability of the target, which is a GPU of a known one."""
    capability = target().compute_capability
    assert capability is not None
    return capability


def num_cores() -> int:
    """The streaming multiprocessors of the target; an H100's where they are not known."""
    return target().num_cores or 132


#: Dtypes that kernels take.
HALF = (jnp.bfloat16, jnp.float16)
FLOATS = (*HALF, jnp.float32)


def lacks_dtype(dtype: DTypeLike, dtypes: Sequence[DTypeLike]) -> str | None:
    """Why operands of a dtype are not served, as a clause of `Implementation.why_not`; or None."""
    if any(jnp.dtype(dtype) == jnp.dtype(each) for each in dtypes):
        return None
    *names, last = (jnp.dtype(each).name for each in dtypes)
    return f"it takes {', '.join(names)} or {last}, not {jnp.dtype(dtype)}"


def _no_backward(*arguments: Any) -> Any:
    raise NotImplementedError("this operation has no backward pass of its own")


class Implementation(NamedTuple):
    """One way to compute an operation.

    Attributes:
        forward: the operation, or its forward pass; its arguments are the operation's own.
        backward: the backward pass, where the operation has one.
        capability: the least compute capability of an NVIDIA GPU; None: every device.
        exactly: whether newer GPUs do not serve either.
        dtypes: that the fact `dtype` may be; empty: any.
        why_not: (target, facts of the call) -> one clause that says what else it does not serve, or None.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] = _no_backward
    capability: tuple[int, int] | None = None
    exactly: bool = False
    dtypes: tuple[DTypeLike, ...] = ()
    why_not: Callable[..., str | None] | None = None

    def reason(self, device: Target, **facts: Any) -> str | None:
        """One clause that says why it cannot serve a call on a device, or None when it can."""
        if self.capability and (reason := device.lacks(self.capability, exactly=self.exactly)):
            return reason
        if self.dtypes and (reason := lacks_dtype(facts["dtype"], self.dtypes)):
            return reason
        return self.why_not(device, **facts) if self.why_not else None


@dataclasses.dataclass(frozen=True, eq=False)
class Registry:
    """The implementations of an operation.

    Attributes:
        op: the operation's name, for messages.
        implementations: by the name that callers force them by, in order of preference.
        preference: (target, facts of a call) -> names in order of preference, where that depends on them.
    """

    op: str
    implementations: dict[str, Implementation]
    preference: Callable[..., Sequence[str]] | None = None

    def __getitem__(self, name: str) -> Implementation:
        """The implementation of that name."""
        return self.implementations[name]

    def reasons(self, **facts: Any) -> dict[str, str | None]:
        """Why each implementation cannot serve a call on the target, or None when it can; in order of preference."""
        device = target()
        names = self.implementations if self.preference is None else self.preference(device, **facts)
        return {name: self.implementations[name].reason(device, **facts) for name in names}

    def choose(self, implementation: str | None, *, direction: str = "", **facts: Any) -> str:
        """`select` the implementation that serves a call.

        Args:
            implementation: the forced one, or None.
            direction: of the pass, for messages, where the passes are forced apart.
            facts: of the call, which implementations judge it by.
        """
        compat.silence_triton_deprecation()  # whatever is chosen: kernels of other backends call Triton's too
        op = f"{self.op} ({direction})" if direction else self.op
        return select(op, implementation, list(self.reasons(**facts).items()))

    def chosen(self, implementation: str | None, **facts: Any) -> Implementation:
        """The implementation that `choose` names."""
        return self[self.choose(implementation, **facts)]


def triton_or_xla(op: str, triton: Implementation, xla: Implementation) -> Registry:
    """The registry of an operation that Triton's kernels compute where they can, and XLA elsewhere.

    Args:
        op: its name, for messages.
        triton: in Triton; from compute capability 8.0 on unless it says another.
        xla: for every device.
    """
    return Registry(op, {"triton": triton._replace(capability=triton.capability or (8, 0)), "xla": xla})


def select(op: str, implementation: str | None, candidates: Sequence[tuple[str, str | None]]) -> str:
    """Choose the implementation that serves a call.

    Args:
        op: name of the operation, for the messages.
        implementation: the forced one, or None for the first that can serve.
        candidates: (name, reason) in order of preference; the reason is one clause saying why the implementation cannot
            serve the call, or None when it can.

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
    """The platform; "cuda" or "rocm" for a device that calls itself "gpu"."""
    if platform != "gpu":
        return platform
    return "rocm" if capability.startswith("gfx") or device_kind.startswith(("gfx", "AMD")) else "cuda"
