"""The results of cases as tables: on the terminal and in Markdown."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from fastjax.bench.results import make_table, show
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.profile import Profile, Share

#: Whose step it is that is not another library's.
OURS = "fastjax"


class Line(NamedTuple):
    """A case and its result.

    Attributes:
        case: the settings.
        result: figures, or why there are none.
        by: whose step it is, with the version of another library.
    """

    case: StepCase
    result: StepResult
    by: str = OURS

    @property
    def rest(self) -> tuple[str, ...]:
        """The layer loop, the forced attention, the compiler's options."""
        return self.case.layer_loop, self.case.attention or "", *self.case.compiler_options

    @property
    def mesh(self) -> str:
        """The mesh; nothing on one device."""
        return "" if self.case.mesh is None else self.case.where

    @property
    def per_device(self) -> float | None:
        """Tokens a second of each device."""
        speed = self.result.tokens_per_second
        return None if speed is None else speed / self.case.devices


Measured = Sequence[Line]


def linear_shares(measured: Measured) -> list[float | None]:
    """For each line its tokens a second over those of one device times the devices; None without that case.

    Args:
        measured: lines of the table.
    """

    def key(line: Line) -> tuple[str, StepCase]:
        return line.by, dataclasses.replace(line.case, mesh=None)

    alone = {key(line): line.per_device for line in measured if line.case.mesh is None}
    pairs = ((line.per_device, alone.get(key(line))) for line in measured)
    return [own / one if own and one else None for own, one in pairs]


def print_results(console: Console, measured: Measured) -> None:
    """The speed and memory of cases of one model, held in one way (`StepCase.apart`), then their profiles.

    Args:
        console: where to.
        measured: lines of the table.
    """
    first, found = measured[0].case, measured[0].result
    spread = any(line.case.mesh is not None for line in measured)
    given = dict.fromkeys(line.case.compiler_options for line in measured if line.case.compiler_options)
    sets = {options: str(number) for number, options in enumerate(given, 1)}  # their names would not fit
    columns = {
        "by": [line.by.partition(" ")[0] for line in measured],  # a version would not fit either
        "mesh": [line.case.where for line in measured],
        "rows": [line.case.rows for line in measured],
        "remat": [line.case.checkpointing for line in measured],
        "loop": [line.case.layer_loop for line in measured],
        "attention": [line.case.attention or "" for line in measured],
        "options": [sets.get(line.case.compiler_options, "") for line in measured],
    }
    always = ("mesh",) if spread else ("remat", "loop")
    shown = {name: values for name, values in columns.items() if name in always or len(set(values)) > 1}
    if set(columns["attention"]) != {""}:
        shown["attention"] = columns["attention"]
    alike = [values[0] for name, values in columns.items() if name in ("rows", "remat", "loop") and name not in shown]
    about = (first.model, first.trained, *alike, *filter(None, [first.apart]), found.device, f"jax {found.jax}")
    counted = any(line.result.peak_bytes is not None for line in measured)
    held = "peak GiB" if counted else "plan GiB"
    numbers = ("step ms", "tokens/s", *(("a device", "share") if spread else ()), "TFLOP/s")
    numbers = (*numbers, held) if spread else (*numbers, "compile s", held, "loss")
    table, reasons = make_table(" · ".join(("step", *about)), tuple(shown), numbers), []
    lines = zip(zip(*shown.values(), strict=True), measured, linear_shares(measured), strict=True)
    for names, line, share in lines:
        if reason := line.result.fault or line.result.error:
            reasons.append((" ".join(filter(None, names)), reason))
            continue
        milliseconds, speed, flops, compiling, memory = _figures(line.result)
        figures = milliseconds, speed, flops, compiling, memory, f"{line.result.losses[-1]:.3f}"
        if spread:
            figures = milliseconds, speed, *_device_figures(line, share), flops, memory
        table.add_row(*names, *figures)
    show(console, table, reasons)
    for options, number in sets.items():
        console.print(f"options {number}: {', '.join(options)}", highlight=False, markup=False)
    for line in measured:
        if line.result.profile is not None:
            _print_profile(console, line.case, line.result.profile)


def markdown(measured: Measured) -> str:
    """A table of the results, a line a case.

    Args:
        measured: lines of the table.
    """
    spread = any(line.case.mesh is not None for line in measured)
    words = ("by", "model", "method", *(("mesh",) if spread else ()), "rows", "remat", "loop")
    numbers = ("step ms", "tokens/s", "TFLOP/s", "compile s", "GiB", *(("a device", "share") if spread else ()))
    lines = [(*words, *numbers), ("---",) * len(words) + ("---:",) * len(numbers)]
    for line, share in zip(measured, linear_shares(measured), strict=True):
        case, result = line.case, line.result
        loop = ", ".join(filter(None, line.rest))
        mesh = (case.where,) if spread else ()
        names = (line.by, case.model, case.trained, *mesh, case.rows, case.kept, loop)
        if reason := result.fault or result.error:
            lines.append((*names, reason, *("",) * (len(numbers) - 1)))
        else:
            lines.append((*names, *_figures(result), *(_device_figures(line, share) if spread else ())))
    text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines)
    found = measured[0].result
    return f"{text}\n\n{found.device}, jax {found.jax}.\n"


def summary(line: Line) -> str:
    """A case and its figures, or the reason that there are none, in one line.

    Args:
        line: of the table.
    """
    case, result = line.case, line.result
    names = " ".join(filter(None, (line.by, case.model, line.mesh, case.rows, case.kept, *line.rest)))
    if reason := result.fault or result.error:
        return f"{names}: {reason}"
    milliseconds, speed, _, compiling, held = _figures(result)
    return f"{names}: {milliseconds} ms, {speed} tokens/s, {held} GiB, compiled in {compiling} s"


def _device_figures(line: Line, share: float | None) -> tuple[str, str]:
    return f"{line.per_device:,.0f}", "-" if share is None else f"{share:.1%}"


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
    mesh = "" if case.mesh is None else f"{case.where} "
    console.print(f"profile · {mesh}{case.rows} {case.checkpointing} {case.layer_loop} · {busy}", highlight=False)
    parts = {"kinds of kernels": profile.kinds, "parts of the step": profile.scopes, "longest kernels": profile.longest}
    for title, shares in parts.items():
        table = make_table(title, ("",), ("ms", "share", "runs"))
        for share in shares:
            table.add_row(*_cells(share))
        console.print(table)


def _cells(share: Share) -> tuple[str, ...]:
    name = share.name if len(share.name) <= 56 else f"{share.name[:53]}..."
    return name, f"{share.milliseconds:,.2f}", f"{share.share:.1%}", f"{share.runs:,.0f}"
