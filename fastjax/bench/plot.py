"""Results as one picture: panels of bars, one above the other.

As everywhere, matplotlib is used without pyplot, so that a user's own figures and backend are left alone.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO


def draw(
    title: str,
    labels: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    colours: Mapping[str, str],
) -> bytes:
    """Draw panels that have their places on the x axis in common.

    Args:
        title: over all panels.
        labels: of the places.
        panels: title → name of a series → its number at each place; 0 is a gap.
        colours: of series by name.

    Returns:
        A PNG.
    """
    from matplotlib import rc_context  # takes a while to import
    from matplotlib.figure import Figure

    from fastjax.training.report.plots import STYLE

    with rc_context(STYLE):
        size = (max(7.0, 2.4 + 1.35 * len(labels)), 3.6 * len(panels))
        figure = Figure(figsize=size, dpi=120, facecolor="white", layout="constrained")
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        for axis, (name, series) in zip(figure.subplots(len(panels), 1), panels.items(), strict=True):
            width = 0.84 / max(1, len(series))
            for index, (own, heights) in enumerate(series.items()):
                places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(labels))]
                bars = axis.bar(places, heights, width * 0.92, label=own, color=colours[own])
                texts = [f"{height:,.{0 if height >= 100 else 2}f}" if height else "" for height in heights]
                axis.bar_label(bars, texts, fontsize=6.5, color="#374151", padding=1.5)
            axis.set_title(name)
            axis.set_xticks(range(len(labels)), labels)
            axis.grid(axis="x", visible=False)
            axis.set_axisbelow(True)
            axis.set_xlim(-0.55, len(labels) - 0.45)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=max(1, len(names)))
        image = BytesIO()
        figure.savefig(image, format="png")
    return image.getvalue()
