"""The report as one picture: figures, plots, settings, environment and commands, for viewers without a browser."""

import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO

from matplotlib import rc_context
from matplotlib.figure import Figure, SubFigure

from fastjax.training.report.facts import Fact
from fastjax.training.report.history import History
from fastjax.training.report.panels import Panel
from fastjax.training.report.plots import GREY, STYLE, draw_panel
from fastjax.training.report.settings import Setting

_WIDTH = 12.0
_LINE = 0.19
"""Height of a line of text, in inches."""
_MOST_LINES = 26
"""Of settings; the page has them all."""


def draw_picture(
    heading: Sequence[str],
    facts: Sequence[Fact],
    panels: Sequence[Panel],
    history: History,
    changed: Sequence[Setting],
    tables: Mapping[str, Mapping[str, str]],
    commands: Sequence[str],
) -> bytes:
    """Draw the run.

    Args:
        heading: its name, its status, and a sentence on it.
        facts: the figures at the top.
        panels: the plots.
        history: the run.
        changed: the settings that differ from their defaults.
        tables: title → label → value, for the column beside the settings.
        commands: for the result.

    Returns:
        A PNG.
    """
    settings = [f"{setting.name}: {setting.value}" for setting in changed]
    left = _text({"Settings that differ from the defaults": settings})
    right = _text({title: [f"{key}: {value}" for key, value in table.items()] for title, table in tables.items()})
    foot = _text({"Use it": [line for command in commands for line in command.splitlines() if line]}, 150)
    wide = [panel for panel in panels if panel.wide]
    narrow = [panel for panel in panels if not panel.wide]
    heights = [
        1.55,
        3.5 * len(wide) + 2.5 * -(-len(narrow) // 2) or _LINE,
        _LINE * (max(len(left), len(right)) + 1),
        _LINE * (len(foot) + 1),
    ]
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, sum(heights)), dpi=110, facecolor="white")
        top, plots, middle, bottom = figure.subfigures(4, 1, squeeze=False, height_ratios=heights)[:, 0]
        _heading(top, heading, facts)
        if panels:
            _plots(plots, wide, narrow, history)
        columns = middle.subfigures(1, 2, squeeze=False)[0]
        for part, lines in ((columns[0], left), (columns[1], right), (bottom, foot)):
            _lines(part, lines)
        file = BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _heading(figure: SubFigure, heading: Sequence[str], facts: Sequence[Fact]) -> None:
    name, status, about = heading
    figure.text(0.02, 0.9, textwrap.shorten(name, 70, placeholder=" …"), fontsize=17, weight="bold", va="top")
    figure.text(0.98, 0.9, textwrap.shorten(status, 60, placeholder=" …"), fontsize=11, va="top", ha="right")
    figure.text(0.02, 0.66, _cut(about, 140), color=GREY, va="top")
    for index, fact in enumerate(facts):
        x = 0.02 + 0.96 * index / len(facts)
        figure.text(x, 0.46, fact.label, fontsize=8, color=GREY, va="top")
        figure.text(x, 0.35, fact.value, fontsize=14, weight="bold", va="top")
        figure.text(x, 0.13, textwrap.fill(fact.note, 180 // len(facts)), fontsize=7, color=GREY, va="top")


def _plots(figure: SubFigure, wide: Sequence[Panel], narrow: Sequence[Panel], history: History) -> None:
    rows = -(-len(narrow) // 2)
    grid = figure.add_gridspec(
        len(wide) + rows, 2, height_ratios=[3.5] * len(wide) + [2.5] * rows, hspace=0.5, wspace=0.24,
        left=0.07, right=0.94, top=0.97, bottom=0.06,
    )  # fmt: skip
    for index, panel in enumerate(wide):
        draw_panel(panel, figure.add_subplot(grid[index, :]), history)
    for index, panel in enumerate(narrow):
        draw_panel(panel, figure.add_subplot(grid[len(wide) + index // 2, index % 2]), history)


def _text(sections: Mapping[str, Sequence[str]], width: int = 72) -> list[tuple[str, bool]]:
    """(line, whether it is a heading) of the sections."""
    lines: list[tuple[str, bool]] = []
    for title, section in sections.items():
        if not section:
            continue
        lines += [("", False)] * bool(lines) + [(title, True)]
        for line in section[:_MOST_LINES]:
            lines += [(part, False) for part in textwrap.wrap(line, width, subsequent_indent="    ") or [""]]
        if len(section) > _MOST_LINES:
            lines.append((f"and {len(section) - _MOST_LINES} more", False))
    return lines


def _lines(figure: SubFigure, lines: Sequence[tuple[str, bool]]) -> None:
    height = figure.bbox.height / figure.dpi
    x = 0.24 / (figure.bbox.width / figure.dpi)
    for index, (line, title) in enumerate(lines):
        font = {"weight": "bold", "fontsize": 10} if title else {"family": "monospace", "fontsize": 8}
        figure.text(x, 1 - (index + 0.5) * _LINE / height, line, va="top", parse_math=False, **font)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
