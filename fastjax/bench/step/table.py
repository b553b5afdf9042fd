"""The results of cases as tables: on the terminal and in Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from fastjax.bench.results import make_table, show
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.profile import Profile, Share


class Line(NamedTuple):
    """A case and its result.

    Attributes:
        case: the settings.
        result: figures, or why there are none.
        by: whose step it is, with the version of another library.
    """

    case: StepCase
    result: StepResult
    by: str = "fastjax"

    @property
    def rest(self) -> tuple[str, str]:
        """The layer loop and the forced attention."""
        return self.case.layer_loop, self.case.attention or ""


Measured = Sequence[Line]


def print_results(console: Console, measured: Measured) -> None:
    """The speed and memory of cases of one model, then their profiles.

    Args:
        console: where to.
        measured: lines of the table.
    """
    first, found = measured[0].case, measured[0].result
    rows = {line.case.rows for line in measured}
    about = (first.model, first.trained, *(rows if len(rows) == 1 else ()), found.device, f"jax {found.jax}")
    counted = any(line.result.peak_bytes is not None for line in measured)
    numbers = ("step ms", "tokens/s", "TFLOP/s", "compile s", "peak GiB" if counted else "plan GiB", "loss")
    columns = {  # a version would not fit
        "by": [line.by.partition(" ")[0] for line in measured] if {line.by for line in measured} > {"fastjax"} else [],
        "rows": [line.case.rows for line in measured] if len(rows) > 1 else [],
        "remat": [line.case.kept for line in measured],
        "loop": [line.case.layer_loop for line in measured],
        "attention": [line.case.attention or "" for line in measured] if any(line.rest[1] for line in measured) else [],
    }
    shown = {name: values for name, values in columns.items() if values}
    table, reasons = make_table(" · ".join(("step", *about)), tuple(shown), numbers), []
    for names, (_, result, _) in zip(zip(*shown.values(), strict=True), measured, strict=True):
        if reason := result.fault or result.error:
            reasons.append((" ".join(filter(None, names)), reason))
        else:
            table.add_row(*names, *_figures(result), f"{result.losses[-1]:.3f}")
    show(console, table, reasons)
    for line in measured:
        if line.result.profile is not None:
            _print_profile(console, line.case, line.result.profile)


def markdown(measured: Measured) -> str:
    """A table of the results, a line a case.

    Args:
        measured: lines of the table.
    """
    head = ("by", "model", "method", "rows", "remat", "loop", "step ms", "tokens/s", "TFLOP/s", "compile s", "GiB")
    lines = [head, ("---",) * 6 + ("---:",) * 5]
    for line in measured:
        case, result = line.case, line.result
        loop = ", ".join(filter(None, line.rest))
        names = (line.by, case.model, case.trained, case.rows, case.kept, loop)
        reason = result.fault or result.error
        lines.append((*names, reason, "", "", "", "") if reason else (*names, *_figures(result)))
    text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines)
    found = measured[0].result
    return f"{text}\n\n{found.device}, jax {found.jax}.\n"


def summary(line: Line) -> str:
    """A case and its figures, or the reason that there are none, in one line.

    Args:
        line: of the table.
    """
    case, result = line.case, line.result
    names = " ".join(filter(None, (line.by, case.model, case.rows, case.kept, *line.rest)))
    if reason := result.fault or result.error:
        return f"{names}: {reason}"
    milliseconds, speed, _, compiling, held = _figures(result)
    return f"{names}: {milliseconds} ms, {speed} tokens/s, {held} GiB, compiled in {compiling} s"


def _figures(result: StepResult) -> tuple[str, ...]:
    held = result.held_bytes
    return (
        f"{(result.step_seconds or 0) * 1e3:,.1f}",
        f"{result.tokens_per_second:,.0f}",
        f"{result.model_tflops_per_second:,.2f}",
        "-" if result.compile_seconds is None else f"{result.compile_seconds:.1f}",
        "-" if held is None else f"{held / 2**30:.2f}",
    )


def _print_profile(console: Console, case: StepCase, profile: Profile) -> None:
    busy = f"{profile.step_milliseconds:,.1f} ms a step, busy {profile.busy:.1%}"
    console.print(f"profile · {case.rows} {case.checkpointing} {case.layer_loop} · {busy}", highlight=False)
    parts = {"kinds of kernels": profile.kinds, "parts of the step": profile.scopes, "longest kernels": profile.longest}
    for title, shares in parts.items():
        table = make_table(title, ("",), ("ms", "share", "runs"))
        for share in shares:
            table.add_row(*_cells(share))
        console.print(table)


def _cells(share: Share) -> tuple[str, ...]:
    name = share.name if len(share.name) <= 56 else f"{share.name[:53]}..."
    return name, f"{share.milliseconds:,.2f}", f"{share.share:.1%}", f"{share.runs:,.0f}"
