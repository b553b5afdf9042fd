"""The results of cases as tables: on the terminal and in Markdown."""

from collections.abc import Sequence

from rich.console import Console

from fastjax.bench.results import make_table, show
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.profile import Profile, Share

Measured = Sequence[tuple[StepCase, StepResult]]


def print_results(console: Console, measured: Measured) -> None:
    """The speed and memory of cases of one model, then their profiles.

    Args:
        console: where to.
        measured: cases with their results.
    """
    (first, found), cases = measured[0], [case for case, _ in measured]
    title = f"step · {first.model} · {first.trained} · {found.device} · jax {found.jax}"
    counted = any(result.peak_bytes is not None for _, result in measured)
    numbers = ("step ms", "tokens/s", "TFLOP/s", "compile s", "peak GiB" if counted else "plan GiB", "loss")
    words = ["rows", "remat", "loop"] + ["attention"] * any(case.attention for case in cases)
    table, reasons = make_table(title, words, numbers), []
    for case, result in measured:
        names = [case.rows, case.checkpointing, case.layer_loop, case.attention or ""][: len(words)]
        if reason := result.fault or result.error:
            reasons.append((" ".join(filter(None, names)), reason))
        else:
            table.add_row(*names, *_figures(result), f"{result.losses[-1]:.3f}")
    show(console, table, reasons)
    for case, result in measured:
        if result.profile is not None:
            _print_profile(console, case, result.profile)


def markdown(measured: Measured) -> str:
    """A table of the results, a line a case.

    Args:
        measured: cases with their results.
    """
    head = ("model", "method", "rows", "remat", "loop", "step ms", "tokens/s", "TFLOP/s", "compile s", "GiB")
    lines = [head, ("---",) * 5 + ("---:",) * 5]
    for case, result in measured:
        names = (case.model, case.trained, case.rows, case.checkpointing, case.layer_loop)
        reason = result.fault or result.error
        lines.append((*names, reason, "", "", "", "") if reason else (*names, *_figures(result)))
    device = measured[0][1]
    text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{text}\n\n{device.device}, jax {device.jax}.\n"


def _figures(result: StepResult) -> tuple[str, ...]:
    held = result.held_bytes
    return (
        f"{(result.step_seconds or 0) * 1e3:,.1f}",
        f"{result.tokens_per_second:,.0f}",
        f"{result.model_tflops_per_second:,.2f}",
        f"{result.compile_seconds:.1f}",
        "-" if held is None else f"{held / 2**30:.2f}",
    )


def _print_profile(console: Console, case: StepCase, profile: Profile) -> None:
    about = f"{case.rows} {case.checkpointing} {case.layer_loop}"
    busy = f"{profile.step_milliseconds:,.1f} ms a step, busy {profile.busy:.1%}"
    parts = ((f"profile · {about} · {busy}", "kind", profile.kinds), ("longest kernels", "kernel", profile.longest))
    for title, name, shares in parts:
        table = make_table(title, (name,), ("ms", "share", "runs"))
        for share in shares:
            table.add_row(*_cells(share))
        console.print(table)


def _cells(share: Share) -> tuple[str, ...]:
    name = share.name if len(share.name) <= 56 else f"{share.name[:53]}..."
    return name, f"{share.milliseconds:,.2f}", f"{share.share:.1%}", f"{share.runs:,.0f}"
