"""Cases of one call that must begin with the same loss: of the same weights and rows, but for how a step computes.

What a case recomputes, holds elsewhere or spreads over devices, its layer loop and its kernels change nothing but the
rounding of intermediate results. A case that is off from half of its like or more has no figure: of two that differ
neither has, since none of them says which is right.
"""

from collections.abc import Hashable

from fastjax.bench.step.case import ROUNDING, StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.table import OURS, Line, Measured

#: Twice what a policy changed of 20 losses of 8B in bfloat16 at most (docs/lab/step.md, "Every regime trains alike"),
#: each a mean over so many tokens. Of fewer tokens errors even out less, by the square root of their number.
_ROUNDING, _TOKENS = 0.0032, 8192
#: Times that with products in float8 or fake quantisers, which make an error of a last bit large, and with a mixture,
#: whose router chooses other experts. On a CPU, by two ways of rounding, a loss of 24 layers shaped as gpt-oss's is off
#: by 0.0027 (root mean square), and in float8 one of 16 layers by 0.007 from float32.
_AMPLIFIED = 8.0


def with_equal_first_losses(measured: Measured) -> list[Line]:
    """The lines, with a fault in the place of figures where a first loss is off.

    Args:
        measured: lines of the table.
    """
    groups: dict[Hashable, list[Line]] = {}
    for line in measured:
        if line.by == OURS and line.result.step_seconds is not None:
            groups.setdefault(_begins(line.case), []).append(line)

    def judged(line: Line) -> Line:
        group = groups.get(_begins(line.case), [])
        off = [other for other in group if not _equal(line, other)] if line in group else []
        return line._replace(result=_without_figures(line, off[0])) if off and 2 * len(off) >= len(group) else line

    return [judged(line) for line in measured]


def _begins(case: StepCase) -> Hashable:
    """Equal for cases that begin with the same loss."""
    return case.plain(optimizer="", steps=0, warmup=0)


def _equal(one: Line, other: Line) -> bool:
    return abs(one.result.losses[0] - other.result.losses[0]) <= _tolerance(one)


def _tolerance(line: Line) -> float:
    """The difference of a first loss that rounding makes."""
    case, result = line.case, line.result
    tokens = (result.tokens_per_second or 0) * (result.step_seconds or 0)
    amplified = case.config.moe is not None or case.base_compute is not None or case.qat is not None
    times, least = ROUNDING[result.dtype or "bfloat16"]
    rounding = _ROUNDING * max(1.0, (_TOKENS / tokens) ** 0.5) * (_AMPLIFIED if amplified else 1.0)
    return times * rounding + least * result.losses[0]


def _without_figures(line: Line, other: Line) -> StepResult:
    found = line.result
    names = " ".join(filter(None, (other.mesh, other.case.kept, *other.rest)))
    reason = (
        f"the first loss is {found.losses[0]:.5f}, and {other.result.losses[0]:.5f} of {names}: expected the same but "
        f"for {_tolerance(line):.1g} by rounding"
    )
    return StepResult(found.device, found.jax, found.dtype, losses=found.losses, fault=reason)
