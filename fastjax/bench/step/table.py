"""The results of cases: a table on the terminal, and rows of a JSON file."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.tables import print_rows
from fastjax.bench.timing import Row

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
    def names(self) -> list[str]:
        """The words that distinguish it from other lines of its model."""
        case = self.case
        mesh = "" if case.mesh is None else case.where
        words = mesh, case.rows, case.kept, case.layer_loop, case.attention or "", *case.compiler_options
        return [word for word in ("" if self.by == OURS else self.by, *words) if word]

    def without_figures(self, fault: str) -> "Line":
        """The line with a fault in the place of its figures."""
        device, jax, dtype, losses = self.result.device, self.result.jax, self.result.dtype, self.result.losses
        return self._replace(result=StepResult(device, jax, dtype, losses=losses, fault=fault))


def rows_of(lines: Sequence[Line], **about: Any) -> list[Row]:
    """The lines as the JSON file has them: settings, figures, and these of each device.

    Args:
        lines: of the table.
        **about: further entries of each row.

    Returns:
        Rows whose `share_of_linear` is the tokens a second over those of one device times the devices; None without
        that case.
    """
    alone = {(line.by, line.case): line.result.tokens_per_second for line in lines if line.case.mesh is None}
    rows = []
    for line in lines:
        case, speed = line.case, line.result.tokens_per_second
        one, each = alone.get((line.by, dataclasses.replace(case, mesh=None))), speed and speed / case.devices
        settings = dataclasses.asdict(case) | {"mesh": case.where, "devices": case.devices}
        figures = {"tokens_per_second_per_device": each, "share_of_linear": each / one if each and one else None}
        rows.append({"by": line.by, **about, **settings, **dataclasses.asdict(line.result), **figures})
    return rows


def print_results(console: Console, lines: Sequence[Line]) -> None:
    """Print the speed and memory of cases of one model.

    Args:
        console: where to.
        lines: of the table.
    """
    first, result = lines[0].case, lines[0].result
    sets = list(dict.fromkeys(line.case.compiler_options for line in lines if line.case.compiler_options))
    counted = any(line.result.peak_bytes is not None for line in lines)
    rows = []
    for line, row in zip(lines, rows_of(lines), strict=True):
        case, memory_bytes = line.case, line.result.peak_bytes or line.result.step_bytes
        row |= {
            "by": line.by.partition(" ")[0],  # a version would not fit
            "rows": case.rows,
            "remat": case.kept,
            "options": sets.index(case.compiler_options) + 1 if case.compiler_options else None,  # nor their names
            "milliseconds": line.result.step_seconds and 1e3 * line.result.step_seconds,
            "loss": line.result.losses[-1] if line.result.losses else None,
            "gib": memory_bytes and memory_bytes / 2**30,
            "reason": line.result.fault or line.result.error,
        }
        rows.append(row)
    columns = {"by": "by", "mesh": "mesh", "rows": "rows", "remat": "remat", "loop": "layer_loop"}
    columns |= {"attention": "attention", "options": "options"}
    words = {name: key for name, key in columns.items() if name == "remat" or len({row[key] for row in rows}) > 1}
    memory = {"peak GiB" if counted else "plan GiB": ("gib", ",.2f")}
    numbers = {"step ms": ("milliseconds", ",.1f"), "tokens/s": ("tokens_per_second", ",.0f")}
    if "mesh" in words:
        numbers |= {"share": ("share_of_linear", ".1%"), **memory}
    else:
        numbers |= {"TFLOP/s": ("model_tflops_per_second", ",.2f"), "compile s": ("compile_seconds", ".1f"), **memory}
        numbers |= {"loss": ("loss", ".3f")}
    alike = [text for name, text in (("rows", first.rows), ("loop", first.layer_loop)) if name not in words]
    about = ("step", first.model, first.trained, *alike, result.device, f"jax {result.jax}")
    print_rows(console, " · ".join(about), rows, words, numbers)
    for place, options in enumerate(sets, 1):
        console.print(f"options {place}: {', '.join(options)}", highlight=False, markup=False)
