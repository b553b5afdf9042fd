"""Write the tables of measured steps in README.md, docs/performance.md and docs/memory.md, and their picture.

    python3 scripts/write_performance_table.py

They are made of the files in docs/measurements, which `fastjax bench step --output` writes; each row of a file is one
measured case with its device, day and command. Of equal settings the newest day counts, and of one day the fastest
measurement: machines of one kind differ by a few percent. Rows without a figure (`fault`, `error`) are left out.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from fastjax.bench.presets import PRESETS
from fastjax.bench.step.case import StepCase
from fastjax.planning.memory import ALLOCATOR_BYTES
from fastjax.training.report.panels import COLOURS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "measurements"
PICTURE = FOLDER / "steps.png"
GIB = 2**30
#: Whose steps the picture shows, and the tables of README.md and docs/memory.md.
CARD = "NVIDIA H200"
#: The run in which Unsloth was measured beside fastjax: its file and its day.
RUN = ("2026-11-22-unsloth.json", "2026-11-22")
_LINK = f"docs/measurements/{RUN[0]}"
#: README's rows: in words, fastjax's policy and loop over the layers, and Unsloth's policy.
BESIDE = (
    ("as much as makes it fastest", "projections", "unroll", "none"),
    ("the same, layers in a loop that compiles sooner", "projections", "scan", "none"),
    ("the layers' inputs alone", "full", "scan", "unsloth"),
)
#: What a table cannot be without.
REQUIRED = ("date", "command", "device", "preset", "batch", "seq", "checkpointing", "layer_loop")

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.solid_capstyle": "round",
}


class Step(NamedTuple):
    """A measured case.

    Attributes:
        file: the name of its file.
        row: its row there.
        case: its settings but the mesh, whose name is in the row.
    """

    file: str
    row: dict[str, Any]
    case: StepCase

    @property
    def card(self) -> str:
        """The device; of several their number and mesh."""
        if self.row.get("devices", 1) == 1:
            return self.row["device"]
        return f"{self.row['devices']}× {self.row['device']}, {self.row['mesh']}"

    @property
    def trained(self) -> str:
        """Method and base; the dtype where it is not bfloat16."""
        dtype = self.row.get("dtype") or "bfloat16"
        return self.case.trained + ("" if dtype == "bfloat16" else f", {dtype}")

    @property
    def kept(self) -> str:
        """The policy of gradient checkpointing, the layer loop, what is forced, and whose step it is."""
        policy, _, more = self.case.kept.partition(", ")
        loop, forced = self.case.layer_loop, self.case.attention or ""
        peer = f"**{self.peer}**" if self.peer else ""
        words = (f"`{policy}`", more, loop, forced, *self.case.compiler_options, peer)
        return ", ".join(filter(None, words))

    @property
    def peer(self) -> str:
        """The project whose step it is, and its version; empty for ours."""
        by = self.row.get("by", "fastjax")
        return "" if by == "fastjax" else by

    @property
    def settings(self) -> tuple[str, ...]:
        """Equal for measurements of one setting."""
        return self.card, self.case.model, self.trained, self.case.rows, self.kept

    @property
    def speed(self) -> float | None:
        """Tokens a second of all devices."""
        return self.row.get("tokens_per_second")

    @property
    def peak(self) -> int | None:
        """The allocator's peak in bytes."""
        return self.row.get("peak_bytes")

    @property
    def planned(self) -> int | None:
        """Bytes that `fastjax plan` says of it."""
        step = self.row.get("step_bytes")
        return self.row.get("planned_bytes", None if step is None else step + ALLOCATOR_BYTES)


def read(folder: Path = FOLDER) -> list[Step]:
    """The measured cases of all files.

    Args:
        folder: of the files.

    Raises:
        SystemExit: a file that `fastjax bench step --output` has not written, by its row and key.
    """
    found = []
    names = {field.name for field in dataclasses.fields(StepCase)} - {"mesh"}
    for file in sorted(folder.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise SystemExit(f"{file}: expected a list of cases, as of `fastjax bench step`, got an object")
        for number, row in enumerate(rows):
            if missing := [key for key in REQUIRED if row.get(key) is None]:
                raise SystemExit(f"{file}: row {number}: expected {', '.join(missing)}, got none")
            given: dict[str, Any] = {
                name: tuple(row[name]) if isinstance(row[name], list) else row[name] for name in names & row.keys()
            }
            if not (row.get("fault") or row.get("error")):
                found.append(Step(file.name, row, StepCase(**given)))
    return found


def newest(steps: Iterable[Step]) -> list[Step]:
    """One measurement of each setting, in the order of the tables."""
    best: dict[tuple[str, ...], Step] = {}
    for step in steps:
        other = best.get(step.settings)
        if other is None or (step.row["date"], step.speed or 0) > (other.row["date"], other.speed or 0):
            best[step.settings] = step
    presets = list(PRESETS)
    return sorted(
        best.values(),
        key=lambda step: (
            *(presets.index(step.case.preset), step.case.model, step.card),
            *(step.case.base_compute or "", step.trained),
            *(step.case.seq, step.case.batch, -(step.speed or 0)),
        ),
    )


def _markdown(words: Sequence[str], numbers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [(*words, *numbers), ("---",) * len(words) + ("---:",) * len(numbers), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.1f}"


def every_step(steps: Sequence[Step]) -> str:
    """The table of docs/performance.md."""
    lines = [
        (*step.settings, f"{step.speed:,.0f}", _gib(step.peak), f"[{step.row['date']}](measurements/{step.file})")
        for step in newest(step for step in steps if step.speed)
    ]
    words = ("card", "model", "trained", "rows", "kept for the backward pass, layer loop")
    return _markdown(words, ("tokens/s", "GiB", "measured"), lines)


def beside(steps: Sequence[Step]) -> str:
    """README's table: steps of 8B with Unsloth's of the same run beside them."""
    speeds = {(step.peer, step.case.checkpointing, step.case.layer_loop): step for step in steps if _is_beside(step)}
    lines = []
    for told, policy, loop, other in BESIDE:
        ours = speeds["", policy, loop]
        (theirs,) = [step for (peer, kept, _), step in speeds.items() if peer and kept == other]
        pair = [f"{step.speed:,.0f} in {_gib(step.peak)} GiB" for step in (ours, theirs)]
        lines.append((told, f"{pair[0]} ({(ours.speed or 0) / (theirs.speed or 1):.2f}×)", pair[1]))
    peer = next(step.peer for step in speeds.values() if step.peer)
    table = _markdown(("kept for the backward pass",), ("fastjax, tokens/s", f"{peer}, tokens/s"), lines)
    now = [step for step in newest(steps) if step.card == CARD and step.case.rows == "4×2,048" and not step.peer]
    now = [step for step in now if (step.case.preset, step.trained) == ("llama3-8b", "QLoRA, NF4, r=16") and step.peak]
    fastest = max(now, key=lambda step: step.speed or 0)
    smallest = min((step for step in now if not step.case.offload_embedding), key=lambda step: step.peak or 0)
    later = " and ".join(
        f"{step.speed:,.0f} in {_gib(step.peak)} GiB ({step.row['date']})" for step in (fastest, smallest)
    )
    return (
        f"{table}\n\nOne {CARD}, {RUN[1]}, a step of each one after the other ([the rows]({_LINK})). "
        f"Since then,\nfastjax alone: {later}, by `fastjax bench step`."
    )


def _is_beside(step: Step) -> bool:
    return (step.file, step.row["date"], step.case.rows, step.case.preset) == (*RUN, "4×2,048", "llama3-8b")


def plans(steps: Sequence[Step]) -> str:
    """The table of docs/memory.md: planned and measured memory."""
    lines = []
    for step in newest(step for step in steps if step.planned and step.peak and step.card == CARD):
        planned, peak = step.planned or 0, step.peak or 0
        what = (step.case.model, step.trained, step.case.rows, step.kept)
        lines.append(
            (*what, f"{planned / 1e9:.2f}", f"{peak / 1e9:.2f}", f"{planned / peak - 1:+.1%}".replace("-", "−"))
        )
    words = ("model", "trained", "rows", "kept, layer loop")
    return _markdown(words, ("planned GB", "measured GB", "off"), lines)


#: Page → the table between its markers.
PAGES: dict[str, Callable[[Sequence[Step]], str]] = {
    "README.md": beside,
    "docs/performance.md": every_step,
    "docs/memory.md": plans,
}
_BETWEEN = re.compile(r"(?<=<!-- scripts/write_performance_table\.py -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def page(name: str, steps: Sequence[Step]) -> str:
    """A page with its table.

    Args:
        name: a key of PAGES.
        steps: all measured cases.
    """
    table = PAGES[name](steps)
    text, count = _BETWEEN.subn(lambda _: table, (ROOT / name).read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{name}: expected one pair of markers of scripts/write_performance_table.py, got {count}")
    return text


def digest(steps: Sequence[Step]) -> str:
    """Steps and peers that the picture shows."""
    return hashlib.sha256(every_step(steps).encode()).hexdigest()


def draw(steps: Sequence[Step]) -> bytes:
    """Tokens a second against memory, a colour a model and method, on axes of logarithms.

    Args:
        steps: all measured cases.

    Returns:
        A PNG, whose description is the digest.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    shown = newest(step for step in steps if step.speed and step.peak and step.card == CARD)
    kinds: dict[str, list[Step]] = {}
    for step in shown:
        kinds.setdefault(f"{step.case.model} · {step.trained}", []).append(step)
    lengths = sorted({step.case.rows for step in shown}, key=lambda rows: (len(rows), rows))
    markers = dict(zip(lengths, "osD^vPX", strict=False))
    options: dict[str, Any] = {"dpi": 120, "facecolor": "white", "layout": "constrained"}
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.0, 4.8), **options)
        axis = figure.subplots()
        further = ("black", "#8b5cf6", "#b45309", "#84cc16", "#7f1d1d", "#22d3ee", "#1e3a8a", "#facc15")
        colours = [*(light for light, _ in COLOURS.values()), *further]
        for number, (kind, group) in enumerate(kinds.items()):
            colour = colours[number % len(colours)]
            for step in group:
                place = ((step.peak or 0) / GIB, step.speed or 0)
                style = "none" if step.peer else "full"
                marker = markers.get(step.case.rows, "o")
                axis.plot(*place, marker, color=colour, markersize=6, alpha=0.85, fillstyle=style)
            axis.plot([], [], "o", color=colour, label=kind)
        for rows, marker in markers.items():
            axis.plot([], [], marker, color="#374151", label=f"{rows} tokens")
        peers = sorted({step.peer for step in shown if step.peer})
        if peers:
            axis.plot([], [], "o", color="#374151", fillstyle="none", label=f"hollow: {', '.join(peers)}")
        axis.set_xscale("log")
        axis.set_yscale("log")
        for axes in (axis.xaxis, axis.yaxis):
            axes.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.set_minor_formatter(NullFormatter())
        axis.set_xlabel("GiB, the allocator's peak")
        axis.set_ylabel("tokens/s")
        axis.set_title(f"Steps measured on one {CARD}")
        figure.legend(loc="outside right upper")
        image = BytesIO()
        figure.savefig(image, format="png", metadata={"Description": digest(steps), "Software": None})
    return image.getvalue()


def main() -> None:
    """See the module."""
    steps = read()
    for name in PAGES:
        (ROOT / name).write_text(page(name, steps), encoding="utf-8")
    PICTURE.write_bytes(draw(steps))


if __name__ == "__main__":
    main()
