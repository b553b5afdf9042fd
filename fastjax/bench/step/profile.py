"""Where the time of a step goes: kernels by kind, by part of the model and by name, and the device's idle time.

A kernel's name says its kind; the first pattern that it has counts. XLA names a fusion after what it computes, so
fusions are told apart by the operations in their names. Where a device runs several kernels at once, the kinds' sum may
exceed the busy time.

XLA keeps the scopes under which JAX traced an instruction (`jax.named_scope`) in its metadata, a fusion those of its
result; the trace names the instruction that a kernel is of.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from fastjax.bench.trace import Kernel, busy_ns

_LONGEST = 25
#: Kind -> pattern of its kernels' names, in the order in which they are tried.
_KINDS = {
    "collectives": r"nccl|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective",
    "copies D2D": r"^memcpy(.?D2D|\d)",  # of a command buffer by kernels, memcpy128 and memcpy32_post
    "copies H2D": r"^memcpy.?H2D",
    "copies D2H": r"^memcpy.?D2H",
    "zeros": r"^memset",
    "attention": r"attention|sdpa|flash|fmha",
    "NF4 decode": r"nf4_dequantize",
    "grouped products": r"grouped_",
    "NF4 products": r"nf4_",
    "gated block": r"^glu_",
    "rope": r"split_rope",
    "loss": r"cross_entropy",
    "Triton GEMM, rank products": r"gemm_fusion|triton_gemm|low_rank",
    "cuBLAS, GEMM": r"nvjet|gemm|cublas|cutlass|xmma|splitk",
    "sorting, gathering": r"sort|scatter|gather|cub::",
    "norms, reductions": r"reduc|norm|softmax",
    "copying fusions": r"copy|transpose|dynamic.(update.)?slice|concatenate|wrapped_slice|broadcast",
    "element-wise": r"fusion|^loop_|^wrapped_|^input_",
    "other": "",
}
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*? metadata=\{[^}]*?op_name="([^"]*)"', re.MULTILINE)
#: Scope -> what it is called, from the innermost out.
_PARTS = {
    "optimizer": "optimizer",
    "attention": "attention",
    "mlp": "mlp",
    "head": "head",
    "embed": "embed",
    "layers": "layers, other",
    "jvp": "loss",
}


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a step.

    Attributes:
        name: of a kind, or of a kernel.
        milliseconds: a step.
        share: of the step.
        runs: of kernels a step.
    """

    name: str
    milliseconds: float
    share: float
    runs: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the time of a step goes, on the mean of devices.

    Attributes:
        step_milliseconds: from the first kernel's start to the last one's end, by the number of steps.
        busy: the share of it in which a kernel runs.
        kinds: by falling time, then "idle".
        scopes: of the kernels' instructions, by falling time, "unknown" for kernels without one.
        longest: kernels by name, by falling time.
    """

    step_milliseconds: float
    busy: float
    kinds: Sequence[Share]
    scopes: Sequence[Share]
    longest: Sequence[Share]


def kind_of(name: str) -> str:
    """The kind of a kernel.

    Args:
        name: as the trace has it.
    """
    return next(kind for kind, pattern in _KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def summarize(kernels: Sequence[Kernel], steps: int, scopes: Mapping[str, str]) -> Profile | None:
    """The profile of steps that ran one after the other.

    Args:
        kernels: of the steps, in the order of their starts.
        steps: their number.
        scopes: of the program's instructions (`scopes_of`).

    Returns:
        The profile; None without kernels.
    """
    if not kernels:
        return None
    devices: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        devices.setdefault(kernel.device, []).append(kernel)
    window = sum(max(kernel.end for kernel in own) - own[0].start for own in devices.values())
    busy = sum(map(busy_ns, devices.values()))
    count = steps * len(devices)

    def shares(named: Iterable[tuple[str, Kernel]]) -> list[Share]:
        sums: dict[str, list[float]] = {}
        for name, kernel in named:
            sums.setdefault(name, []).append(kernel.end - kernel.start)
        found = [Share(name, sum(t) / count * 1e-6, sum(t) / window, len(t) / count) for name, t in sums.items()]
        return sorted(found, key=lambda share: -share.milliseconds)

    idle = Share("idle", (window - busy) / count * 1e-6, 1 - busy / window, 0.0)
    return Profile(
        step_milliseconds=window / count * 1e-6,
        busy=busy / window,
        kinds=[*shares((kind_of(kernel.name), kernel) for kernel in kernels), idle],
        scopes=shares((scopes.get(kernel.op, "unknown"), kernel) for kernel in kernels),
        longest=shares((kernel.name, kernel) for kernel in kernels)[:_LONGEST],
    )


def scopes_of(program: str) -> dict[str, str]:
    """Instruction -> part and pass, "attention, backward".

    Args:
        program: the compiled step's text.
    """
    return {name: _scope(path) for name, path in _INSTRUCTION.findall(program)}


def _scope(path: str) -> str:
    words = set(re.findall(r"\w+", path))
    part = next((called for scope, called in _PARTS.items() if scope in words), None)
    if part is None or part == "optimizer":
        return part or "other"
    if "rematted_computation" in words:
        return f"{part}, recomputed"
    return f"{part}, {'backward' if 'transpose(' in path else 'forward'}"
