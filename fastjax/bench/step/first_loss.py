"""Cases of one call that must begin with the same loss: of the same weights and rows, but for how a step computes.

What a case recomputes, holds elsewhere or spreads over devices, its layer loop and its kernels change nothing but the
rounding of intermediate results. A case that is off from half of its like or more has no figure: of two that differ
neither has, since none of them says which is right.
"""

from collections.abc import Sequence

from fastjax.bench.step.case import StepCase
from fastjax.bench.step.table import OURS, Line

#: Twice what a policy changed of 20 losses of 8B in bfloat16 at most (docs/lab/step.md, "Every regime trains alike"),
#: each a mean over so many tokens. Of fewer tokens errors even out less, by the square root of their number.
_ROUNDING, _TOKENS = 0.0032, 8192
#: Dtype → times the rounding of bfloat16, as float16 has three bits more and float32 sixteen, and what is added for
#: sums in another order.
_DTYPES = {"bfloat16": (1.0, 0.0), "float16": (2.0**-3, 0.0), "float32": (2.0**-16, 1e-5)}
#: Times that with products in float8 or fake quantisers, which make an error of a last bit large, and with a mixture,
#: whose router chooses other experts. On a CPU, by two ways of rounding, a loss of 24 layers shaped as gpt-oss's is off
#: by 0.0027 (root mean square), and in float8 one of 16 layers by 0.007 from float32.
_AMPLIFIED = 8.0


def with_equal_first_losses(lines: Sequence[Line]) -> list[Line]:
    """The lines, with a fault in the place of figures where a first loss is off.

    Args:
        lines: of the table.
    """
    groups: dict[StepCase, list[Line]] = {}
    for line in lines:
        if line.by == OURS and line.result.step_seconds is not None:
            groups.setdefault(line.case.plain(optimizer="", steps=0, warmup=0), []).append(line)
    faults: dict[int, str] = {}
    for group in groups.values():
        for line in group:
            loss, allowed = line.result.losses[0], _tolerance(line)
            off = [other for other in group if abs(loss - other.result.losses[0]) > allowed]
            if off and 2 * len(off) >= len(group):
                faults[id(line)] = (
                    f"the first loss is {loss:.5f}, and {off[0].result.losses[0]:.5f} of {' '.join(off[0].names)}: "
                    f"expected the same but for {allowed:.1g} by rounding"
                )
    return [line.without_figures(faults[id(line)]) if id(line) in faults else line for line in lines]


def _tolerance(line: Line) -> float:
    """The difference of a first loss that rounding makes."""
    case, result = line.case, line.result
    tokens = (result.tokens_per_second or 0) * (result.step_seconds or 0)
    amplified = case.config.moe is not None or case.base_compute == "float8" or case.qat is not None
    times, least = _DTYPES[result.dtype or "bfloat16"]
    rounding = _ROUNDING * max(1.0, (_TOKENS / tokens) ** 0.5) * (_AMPLIFIED if amplified else 1.0)
    return times * rounding + least * result.losses[0]
