"""The speeds as one picture: TFLOP/s by case and contender, forward above forward with backward.

As everywhere, matplotlib is used without pyplot, so that a user's own figures and backend are left alone.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastjax.training.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, STYLE

if TYPE_CHECKING:
    from fastjax.bench.attention.speed import SpeedResult

_COLOURS = {
    "mosaic": BLUE,
    "cudnn": GREEN,
    "triton": ORANGE,
    "jax_mosaic": PINK,
    "jax_triton": RED,
    "tokamax": "#56B4E9",
    "xla": GREY,
}
_TITLES = {"forward": "Forward, TFLOP/s", "both": "Forward and backward, TFLOP/s"}


def draw(results: "Sequence[SpeedResult]", title: str) -> bytes:
    """Draw the results.

    Args:
        results: the lines of the table; those without a time leave a gap.
        title: over both plots.

    Returns:
        A PNG.
    """
    cases = list(dict.fromkeys((line.case, line.title) for line in results))
    names = [name for name in _COLOURS if any(line.implementation == name and line.milliseconds for line in results)]
    with rc_context(STYLE):
        figure = Figure(
            figsize=(max(7.0, 2.4 + 1.35 * len(cases)), 7.2), dpi=120, facecolor="white", layout="constrained"
        )
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        for axis, (direction, words) in zip(figure.subplots(len(_TITLES), 1), _TITLES.items(), strict=True):
            found = {
                (line.case, line.implementation): line.teraflops_per_second
                for line in results
                if line.direction == direction
            }
            _bars(axis, [case for case, _ in cases], names, found)
            axis.set_title(words)
            axis.set_xticks(range(len(cases)), [_broken(words) for _, words in cases])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(names)))
        image = BytesIO()
        figure.savefig(image, format="png")
    return image.getvalue()


def _bars(axis: Axes, cases: Sequence[str], names: Sequence[str], found: dict[tuple[str, str], float | None]) -> None:
    width = 0.84 / max(1, len(names))
    for index, name in enumerate(names):
        heights = [found.get((case, name)) for case in cases]
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(cases))]
        bars = axis.bar(places, [height or 0.0 for height in heights], width * 0.92, label=name, color=_COLOURS[name])
        texts = ["" if height is None else f"{height:.3g}" if height < 100 else f"{height:.0f}" for height in heights]
        axis.bar_label(bars, texts, fontsize=6.5, color="#374151", padding=1.5)
    axis.grid(axis="x", visible=False)
    axis.set_axisbelow(True)
    axis.set_xlim(-0.55, len(cases) - 0.45)


def _broken(title: str) -> str:
    """The shape on one line, the case's features on the next."""
    return title.replace(" ", "\n", 1)
