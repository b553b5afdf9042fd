"""The choice among policies of rematerialisation: the fastest whose step fits in memory."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastjax.planning.device import pinned_setting
from fastjax.planning.memory import MemoryLimits, StepMemory


class RejectedPolicy(NamedTuple):
    """A policy that does not fit.

    Attributes:
        policy: its name.
        needed: bytes on the device, at least.
        host: bytes in the host's memory where these are too many; else 0.
        pinned: whether XLA's limit of pinned memory alone is too low for it.
    """

    policy: str
    needed: int
    host: int = 0
    pinned: bool = False

    def __str__(self) -> str:
        """In words."""
        host = f" and {_gib(self.host)} in the host's memory" if self.host else ""
        return f"{self.policy} would need {_gib(self.needed)}{host}{_with_setting(self.pinned, self.host)}"


class PolicyChoice(NamedTuple):
    """A policy, and why it was taken.

    Attributes:
        policy: its name.
        memory: of its step.
        limit: bytes that the step may take of the device.
        refused: other policies, which do not fit.
        compiled: the step.
        host_limit: bytes that it may take of the host.
        pinned: whether XLA's limit of pinned memory alone is too low for the step.
    """

    policy: str
    memory: StepMemory
    limit: int
    refused: Sequence[RejectedPolicy]
    compiled: Any
    host_limit: float = float("inf")
    pinned: bool = False

    @property
    def room(self) -> MemoryLimits:
        """The bytes that the step may take."""
        return MemoryLimits(self.limit, self.host_limit)

    @property
    def fits(self) -> bool:
        """Whether the step fits; if none does, the one that needs least is taken."""
        return self.room.holds(self.memory)

    def row(self) -> dict[str, Any]:
        """In numbers, for the run's metrics."""
        return {
            "policy": self.policy,
            "device_bytes": self.memory.device,
            "host_bytes": self.memory.host,
            "limit_bytes": self.limit,
            "host_limit_bytes": int(self.host_limit) if self.host_limit < float("inf") else None,
            "refused": {one.policy: one.needed for one in self.refused},
        }

    def __str__(self) -> str:
        """In words, for the beginning of a run."""
        line = f"gradient checkpointing: {self.policy}, with {_gib(self.memory.device)} of {_gib(self.limit)} GiB"
        if self.memory.host:
            much = f" of {_gib(self.host_limit)} GiB" if self.memory.host > self.host_limit else ""
            line += f" and {_gib(self.memory.host)}{much} in the host's memory"
        if not self.fits:
            line += f", which is more than there is{_with_setting(self.pinned, self.memory.host)}"
        return line + "".join(f"; {one}" for one in self.refused)


def choose(
    policies: Sequence[str],
    limit: int,
    host: float,
    *,
    at_least: Callable[[str], int | None],
    compile: Callable[[str], tuple[StepMemory, Any]],
    pinned: float = float("inf"),
) -> PolicyChoice:
    """The first policy whose step fits, or the one that needs least: of the host, where that has too little for all.

    Args:
        policies: the fastest first, of which one at least can be taken.
        limit: bytes that the step may take on the device.
        host: bytes that the host has for it.
        at_least: a lower bound of a policy's bytes, without compiling, or None where the policy cannot be taken; one
            beyond the limit is not compiled.
        compile: compiles a policy's step: its memory, and the step.
        pinned: bytes of the host's memory that XLA takes for the device at most.
    """
    refused: list[RejectedPolicy] = []
    tried: dict[str, tuple[StepMemory, Any]] = {}
    there, room = MemoryLimits(limit, host), MemoryLimits(limit, min(host, pinned))
    for policy in policies:
        needed = at_least(policy)
        if needed is None:
            continue
        if needed <= limit:
            memory, compiled = tried[policy] = compile(policy)
            if room.holds(memory):
                return PolicyChoice(policy, memory, limit, refused, compiled, room.host)
            if memory.host > room.host:
                refused.append(RejectedPolicy(policy, memory.device, memory.host, there.holds(memory)))
                continue
            needed = memory.device
        refused.append(RejectedPolicy(policy, needed))
    least = min(reversed(refused), key=lambda one: (one.host, one.needed)).policy
    memory, compiled = tried.get(least) or compile(least)
    others = [one for one in refused if one.policy != least]
    return PolicyChoice(least, memory, limit, others, compiled, room.host, there.holds(memory))


def first_layers(limit: float, full: float, rich: float, layers: int) -> str | None:
    """The policy that keeps projections in as many layers as fit, by memory that grows by as much with each.

    Args:
        limit: bytes that the step may take.
        full: bytes of the step with "full".
        rich: of the step with "projections".
        layers: of the model.

    Returns:
        "projections:k" with k from 1 to layers - 1; None: there is no such k.
    """
    count = int((limit - full) * layers / (rich - full)) if rich > full else 0
    return f"projections:{count}" if 0 < count < layers else None


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"


def _with_setting(pinned: bool, host: int) -> str:
    return f" (XLA takes so much with {pinned_setting(host)} in the environment)" if pinned else ""
