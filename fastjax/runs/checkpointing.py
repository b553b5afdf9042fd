"""The train step of a run, compiled before its first batch, with a policy of rematerialisation that fits.

On a device whose memory is known the compiler's layout of the step is looked at before it runs, and what was compiled
is what runs. On a CPU the step is compiled when it is called first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fastjax.planning.arrays import largest_arrays
from fastjax.planning.choice import Choice, candidates, choose
from fastjax.planning.device import memory_limit
from fastjax.planning.memory import ALLOCATOR_BYTES, StepMemory
from fastjax.planning.work import stacked_bytes

#: Arrays that a message names.
_SHOWN = 5


class RunStep(NamedTuple):
    """The train step of a run.

    Attributes:
        policy: of rematerialisation.
        call: the step.
        choice: how the policy was chosen; None: the device's memory is not known.
    """

    policy: str
    call: Callable[..., Any]
    choice: Choice | None


def run_policies(setting: bool | str, earlier: str | None) -> tuple[str, ...]:
    """The policies to choose from, the fastest first.

    Args:
        setting: `model.use_gradient_checkpointing`.
        earlier: policy of the run that is resumed, so that its numbers go on; None: there is none.
    """
    if setting == "auto":
        return candidates() if earlier is None else (earlier,)
    return ("full" if setting is True else "projections" if setting is False else setting,)


def device_stats() -> Mapping[str, int] | None:
    """Figures of the run's device, for its allocator; None: it keeps none."""
    return jax.local_devices()[0].memory_stats()


def compile_step(policies: Sequence[str], make: Callable[[str], Any], state: Any, frozen: Any, batch: Any) -> RunStep:
    """The step with the first policy that fits on the device.

    Args:
        policies: the fastest first.
        make: the jitted step of a policy.
        state: the run's.
        frozen: the frozen weights.
        batch: the shapes of a batch.
    """
    stats = device_stats()
    limit = memory_limit(stats)
    if stats is None or limit is None:
        policy = "full" if len(policies) > 1 else policies[0]
        return RunStep(policy, make(policy), None)
    arguments = sum(leaf.nbytes for leaf in jax.tree.leaves((state, frozen)))
    beside = max(0, stats["bytes_in_use"] - arguments)
    traced: dict[str, Any] = {}

    def at_least(policy: str) -> int:
        traced[policy] = make(policy).trace(state, frozen, batch)
        return arguments + stacked_bytes(traced[policy].jaxpr) + ALLOCATOR_BYTES

    def compile(policy: str) -> tuple[StepMemory, Any]:
        program = traced.get(policy) or make(policy).trace(state, frozen, batch)
        compiled = program.lower().compile()
        return StepMemory.of(compiled), compiled

    choice = choose(policies, limit - beside, at_least=at_least, compile=compile)
    return RunStep(choice.policy, choice.compiled, choice)


def memory_advice(message: str, choice: Choice | None) -> str:
    """What to do about a device that is out of memory.

    Args:
        message: the allocator's.
        choice: the step that ran, if its memory was looked at.
    """
    lower = (
        "lower training.per_device_train_batch_size (and raise gradient_accumulation_steps as much) or "
        "model.max_seq_length"
    )
    text = f"the device has not enough memory: {message}"
    if choice is None:
        return f"{text}. Set model.use_gradient_checkpointing: true, or {lower}"
    arrays = "; ".join(map(str, largest_arrays(choice.compiled.as_text(), _SHOWN)))
    held, step = (count / 2**30 for count in (choice.memory.arguments, choice.memory.temporaries))
    text += f". The step ({choice.policy}) holds {held:.1f} GiB of weights and state and {step:.1f} beside them"
    text += f", the largest arrays: {arrays}" if arrays else ""
    slower = _after(choice.policy)
    return f"{text}. {f'Set model.use_gradient_checkpointing: {slower}, or ' if slower else ''}{lower}"


def _after(policy: str) -> str | None:
    """The policy that takes less memory than this one; None: there is none."""
    every = ("none", *candidates())
    rest = every[every.index(policy) + 1 :] if policy in every else ()
    return rest[0] if rest else None
