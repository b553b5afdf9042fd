"""The choice among policies of rematerialisation: the fastest whose step fits in memory."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastjax.models.remat import POLICIES
from fastjax.planning.memory import Room, StepMemory


def candidates() -> tuple[str, ...]:
    """The policies to choose from, the fastest first. "none" is not among them: it keeps more, and is no faster."""
    return tuple(name for name in POLICIES if name != "none")


class Refused(NamedTuple):
    """A policy that does not fit.

    Attributes:
        policy: its name.
        needed: bytes on the device, at least.
        host: bytes in the host's memory where these are too many; else 0.
    """

    policy: str
    needed: int
    host: int = 0

    def __str__(self) -> str:
        """In words."""
        host = f" and {_gib(self.host)} in the host's memory" if self.host else ""
        return f"{self.policy} would need {_gib(self.needed)}{host}"


class Choice(NamedTuple):
    """A policy, and why it was taken.

    Attributes:
        policy: its name.
        memory: of its step.
        limit: bytes that the step may take of the device.
        refused: other policies, which do not fit.
        compiled: the step.
    """

    policy: str
    memory: StepMemory
    limit: int
    refused: Sequence[Refused]
    compiled: Any

    @property
    def fits(self) -> bool:
        """Whether the step fits; if none does, the one that needs least is taken."""
        return self.memory.device <= self.limit

    def row(self) -> dict[str, Any]:
        """In numbers, for the run's metrics."""
        return {
            "policy": self.policy,
            "device_bytes": self.memory.device,
            "host_bytes": self.memory.host,
            "limit_bytes": self.limit,
            "refused": {one.policy: one.needed for one in self.refused},
        }

    def __str__(self) -> str:
        """In words, for the beginning of a run."""
        line = f"gradient checkpointing: {self.policy}, with {_gib(self.memory.device)} of {_gib(self.limit)} GiB"
        if self.memory.host:
            line += f" and {_gib(self.memory.host)} in the host's memory"
        if not self.fits:
            line += ", which is more than there is"
        return line + "".join(f"; {one}" for one in self.refused)


def choose(
    policies: Sequence[str],
    limit: int,
    host: float,
    *,
    at_least: Callable[[str], int | None],
    compile: Callable[[str], tuple[StepMemory, Any]],
) -> Choice:
    """The first policy whose step fits, or the one that needs least.

    Args:
        policies: the fastest first.
        limit: bytes that the step may take on the device.
        host: bytes that it may take of the host.
        at_least: a lower bound of a policy's bytes, without compiling, or None where the policy cannot be taken; one
            beyond the limit is not compiled.
        compile: compiles a policy's step: its memory, and the step.
    """
    refused: list[Refused] = []
    tried: dict[str, tuple[StepMemory, Any]] = {}
    for policy in policies:
        needed = at_least(policy)
        if needed is None:
            continue
        if needed <= limit:
            memory, compiled = tried[policy] = compile(policy)
            if Room(limit, host).holds(memory):
                return Choice(policy, memory, limit, refused, compiled)
            if memory.host > host:
                refused.append(Refused(policy, memory.device, memory.host))
                continue
            needed = memory.device
        refused.append(Refused(policy, needed))
    least = min(reversed(refused), key=lambda one: (one.host > 0, one.needed)).policy
    memory, compiled = tried.get(least) or compile(least)
    others = [one for one in refused if one.policy != least]
    return Choice(least, memory, limit, others, compiled)


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


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
