"""Policies of rematerialisation, one table: the residuals of a layer that outlive its forward pass, speed and memory.

A policy says of each named value whether it stays on the device, is moved to pinned host memory and back (Unsloth's
"unsloth", and Zero-Offload's idea, arXiv 2101.06840), or is computed again (Chen et al., arXiv 1604.06174).
"""

from collections.abc import Mapping
from typing import NamedTuple

from fastjax.errors import ConfigError
from fastjax.residuals import ATTENDED, HEADS, LAYER_INPUT, SAVED


class Policy(NamedTuple):
    """The named values of a layer that are kept for its backward pass, and where the policy stands among the others.

    Attributes:
        kept: on the device, beside the layer's input unless this is offloaded.
        offloaded: in pinned host memory.
        speed: place among the policies, the fastest first: where copies to the host are not hidden, and where they are.
        memory: place by what a step holds on the device, the most first.
    """

    kept: tuple[str, ...]
    offloaded: tuple[str, ...]
    speed: tuple[int, int]
    memory: int


#: By name, as measured (docs/memory.md). "none" leaves the choice to JAX, which keeps everything but weights gathered
#: from other devices. It is never chosen: where both fitted it was as fast as "projections" (118.8 and 119.1 ms,
#: docs/lab/step.md).
POLICIES: Mapping[str, Policy | None] = {
    "none": None,
    "projections": Policy(SAVED, (), (1, 1), 1),
    "attention": Policy(("attention_out", "attention_lse", "lora"), (), (2, 2), 2),
    "full": Policy((), (), (3, 5), 3),
    "offload": Policy((), (LAYER_INPUT,), (4, 6), 6),
    "offload_attention": Policy(("attention_lse", "lora"), (LAYER_INPUT, "attention_out"), (5, 4), 5),
    "offload_projections": Policy(
        ("attention_lse", "lora"), (LAYER_INPUT, HEADS, "attention_out", ATTENDED), (6, 3), 4
    ),
}


def policy_of(remat: str, index: int) -> str:
    """The policy of a layer.

    Args:
        remat: a name of `POLICIES`, or "NAME:k": the first k layers by NAME, the others by "full"; by "offload" where
            NAME sends more to the host's memory than the layers' inputs.
        index: the layer.
    """
    name, _, first = remat.partition(":")
    if not first or index < int(first):
        return name
    policy = POLICIES[name]
    return "offload" if policy is not None and len(policy.offloaded) > 1 else "full"


def check_policy(remat: str) -> str:
    """The setting itself.

    Args:
        remat: as `policy_of` takes it.

    Raises:
        ConfigError: it is none.
    """
    name, colon, first = remat.partition(":")
    if name not in POLICIES or (colon and not (first.isascii() and first.isdigit())):
        expected = f"one of {list(POLICIES)}, or NAME:k for the first k layers"
        raise ConfigError(f"use_gradient_checkpointing: expected {expected}, got {remat!r}")
    return remat


def offloads(remat: str) -> bool:
    """Whether a policy keeps something in the host's memory.

    Args:
        remat: a name of `POLICIES`.
    """
    policy = POLICIES[remat]
    return policy is not None and bool(policy.offloaded)


def candidates(*, hidden: bool) -> tuple[str, ...]:
    """The policies to choose from, the fastest first.

    Args:
        hidden: whether copies to and from the host run beside products, as in scanned layers on one device.
    """
    places = {name: policy.speed[hidden] for name, policy in POLICIES.items() if policy is not None}
    return tuple(sorted(places, key=places.__getitem__))


def memory_rank(policy: str) -> int:
    """The place of a policy by what a step holds on the device, the most first.

    Args:
        policy: as `policy_of` takes it; of "NAME:k" that of NAME.
    """
    setting = POLICIES[policy.partition(":")[0]]
    return 0 if setting is None else setting.memory


def holds_more(policy: str, other: str) -> bool:
    """Whether a step holds more on the device with a policy than with another one.

    Args:
        policy: its name, as `policy_of` takes it.
        other: that of the other one.
    """
    return memory_rank(policy) < memory_rank(other)
