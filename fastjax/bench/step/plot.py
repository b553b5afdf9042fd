"""The results as one picture: tokens a second and memory, a bar a case.

As everywhere, matplotlib is used without pyplot, so that a user's own figures and backend are left alone.
"""

from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from fastjax.bench.step.table import Measured
from fastjax.training.report.plots import BLUE, GREEN, GREY, ORANGE, STYLE

_COLOURS = {"fastjax": (BLUE, GREEN)}
_OTHERS = (GREY, ORANGE)


def draw(measured: Measured, title: str) -> bytes:
    """Draw the results.

    Args:
        measured: lines of the table; those without a figure leave a gap.
        title: over both plots.

    Returns:
        A PNG.
    """
    panels: tuple[tuple[str, str, list[float]], ...] = (
        ("tokens/s", ",.0f", [line.result.tokens_per_second or 0.0 for line in measured]),
        ("GiB", ".2f", [(line.result.held_bytes or 0) / 2**30 for line in measured]),
    )
    labels = [
        "\n".join(filter(None, (line.by, line.mesh, line.case.rows, line.case.checkpointing, *line.rest)))
        for line in measured
    ]
    options: dict[str, Any] = {"dpi": 120, "facecolor": "white", "layout": "constrained"}
    with rc_context(STYLE):
        figure = Figure(figsize=(max(7.0, 2.0 + 1.1 * len(measured)), 6.4), **options)
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        for number, (axis, (name, form, heights)) in enumerate(zip(figure.subplots(2, 1), panels, strict=True)):
            colours = [_COLOURS.get(line.by, _OTHERS)[number] for line in measured]
            bars = axis.bar(range(len(heights)), heights, 0.7, color=colours)
            axis.bar_label(bars, [format(height, form) if height else "" for height in heights], fontsize=7)
            axis.set_title(name)
            axis.set_xticks(range(len(labels)), labels)
            axis.grid(axis="x", visible=False)
            axis.set_axisbelow(True)
        image = BytesIO()
        figure.savefig(image, format="png")
    return image.getvalue()
