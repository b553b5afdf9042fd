"""The results of cases as tables, on the terminal and in Markdown, and as a picture."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from fastjax.bench import plot
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.profile import Profile
from fastjax.bench.tables import as_markdown, print_rows
from fastjax.training.report.panels import COLOURS

#: Whose step it is that is not another library's.
OURS = "fastjax"


class Line(NamedTuple):
    """A case and its result.

    Attributes:
        case: the settings.
        result: figures, or why there are none.
        by: whose step it is, with the version of another library.
        share: tokens a second over those of one device times the devices; None without that case.
    """

    case: StepCase
    result: StepResult
    by: str = OURS
    share: float | None = None

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

    @property
    def reason(self) -> str | None:
        """Why there is no figure."""
        return self.result.fault or self.result.error


Measured = Sequence[Line]

#: Name of a column → its cell, for lines with figures.
_FIGURES = {
    "step ms": lambda line: f"{(line.result.step_seconds or 0) * 1e3:,.1f}",
    "tokens/s": lambda line: f"{line.result.tokens_per_second:,.0f}",
    "a device": lambda line: f"{line.per_device:,.0f}",
    "share": lambda line: "-" if line.share is None else f"{line.share:.1%}",
    "TFLOP/s": lambda line: f"{line.result.model_tflops_per_second:,.2f}",
    "compile s": lambda line: "-" if line.result.compile_seconds is None else f"{line.result.compile_seconds:.1f}",
    "GiB": lambda line: "-" if line.result.held_bytes is None else f"{line.result.held_bytes / 2**30:.2f}",
    "loss": lambda line: f"{line.result.losses[-1]:.3f}",
}
#: Figures on the terminal, of one device and of several.
_SHOWN = {
    False: ("step ms", "tokens/s", "TFLOP/s", "compile s", "GiB", "loss"),
    True: ("step ms", "tokens/s", "a device", "share", "TFLOP/s", "GiB"),
}


def with_shares(measured: Measured) -> list[Line]:
    """The lines with their shares.

    Args:
        measured: lines of the table.
    """

    def key(line: Line) -> tuple[str, StepCase]:
        return line.by, dataclasses.replace(line.case, mesh=None)

    alone = {key(line): line.per_device for line in measured if line.case.mesh is None}
    pairs = ((line, alone.get(key(line))) for line in measured)
    return [line._replace(share=line.per_device / one if line.per_device and one else None) for line, one in pairs]


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
        "by": lambda line: line.by.partition(" ")[0],  # a version would not fit either
        "mesh": lambda line: line.case.where,
        "rows": lambda line: line.case.rows,
        "remat": lambda line: line.case.checkpointing,
        "loop": lambda line: line.case.layer_loop,
        "attention": lambda line: line.case.attention or "",
        "options": lambda line: sets.get(line.case.compiler_options, ""),
    }
    always = ("mesh",) if spread else ("remat", "loop")
    values = {name: {cell(line) for line in measured} for name, cell in columns.items()}
    words = {name: cell for name, cell in columns.items() if name in always or len(values[name]) > 1}
    if values["attention"] != {""}:
        words["attention"] = columns["attention"]
    alike = [columns[name](measured[0]) for name in ("rows", "remat", "loop") if name not in words]
    about = (first.model, first.trained, *alike, *filter(None, [first.apart]), found.device, f"jax {found.jax}")
    counted = any(line.result.peak_bytes is not None for line in measured)
    held = "peak GiB" if counted else "plan GiB"
    numbers = {held if name == "GiB" else name: _FIGURES[name] for name in _SHOWN[spread]}
    lines = with_shares(measured)
    print_rows(console, " · ".join(("step", *about)), lines, words, numbers, reason=lambda line: line.reason)
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
    rows = []
    for line in with_shares(measured):
        case, loop = line.case, ", ".join(filter(None, line.rest))
        mesh = (case.where,) if spread else ()
        figures = [_FIGURES[name](line) for name in numbers] if line.reason is None else [line.reason]
        figures += [""] * (len(numbers) - len(figures))
        rows.append((line.by, case.model, case.trained, *mesh, case.rows, case.kept, loop, *figures))
    found = measured[0].result
    return f"{as_markdown(rows, words, numbers)}\n\n{found.device}, jax {found.jax}.\n"


def summary(line: Line) -> str:
    """A case and its figures, or the reason that there are none, in one line.

    Args:
        line: of the table.
    """
    case = line.case
    names = " ".join(filter(None, (line.by, case.model, line.mesh, case.rows, case.kept, *line.rest)))
    if line.reason is not None:
        return f"{names}: {line.reason}"
    milliseconds, speed, held, compiling = (
        _FIGURES[name](line) for name in ("step ms", "tokens/s", "GiB", "compile s")
    )
    return f"{names}: {milliseconds} ms, {speed} tokens/s, {held} GiB, compiled in {compiling} s"


def draw(measured: Measured, title: str) -> bytes:
    """Tokens a second and memory, a bar a case, as a PNG.

    Args:
        measured: lines of the table; those without a figure leave a gap.
        title: over both plots.
    """
    labels = [
        "\n".join(filter(None, (line.by, line.mesh, line.case.rows, line.case.checkpointing, *line.rest)))
        for line in measured
    ]
    panels = {
        "tokens/s": [line.result.tokens_per_second or 0.0 for line in measured],
        "GiB": [(line.result.held_bytes or 0) / 2**30 for line in measured],
    }
    names = list(dict.fromkeys(line.by for line in measured))

    def of(name: str, heights: list[float]) -> list[float]:
        return [height if line.by == name else 0.0 for line, height in zip(measured, heights, strict=True)]

    series = {panel: {name: of(name, heights) for name in names} for panel, heights in panels.items()}
    return plot.draw(title, labels, series, {name: COLOURS["blue" if name == OURS else "grey"][0] for name in names})


def _print_profile(console: Console, case: StepCase, profile: Profile) -> None:
    busy = f"{profile.step_milliseconds:,.1f} ms a step, busy {profile.busy:.1%}"
    mesh = "" if case.mesh is None else f"{case.where} "
    console.print(f"profile · {mesh}{case.rows} {case.checkpointing} {case.layer_loop} · {busy}", highlight=False)
    parts = {"kinds of kernels": profile.kinds, "parts of the step": profile.scopes, "longest kernels": profile.longest}
    words = {"": lambda share: share.name if len(share.name) <= 56 else f"{share.name[:53]}..."}
    numbers = {
        "ms": lambda share: f"{share.milliseconds:,.2f}",
        "share": lambda share: f"{share.share:.1%}",
        "runs": lambda share: f"{share.runs:,.0f}",
    }
    for title, shares in parts.items():
        print_rows(console, title, shares, words, numbers, reason=lambda share: None)
