"""Pages with charts: one self-contained file each, with plotly's JavaScript, that needs no network."""

import base64
import functools
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from fastjax.training.report.facts import show_loss
from fastjax.training.report.panels import COLOURS


def render_page(template: str, charts: Sequence[dict[str, Any]], **values: Any) -> str:
    """Fill in a page.

    Args:
        template: name of the template, which extends frame.html.jinja.
        charts: from `charts.describe_chart`, in order.
        values: of the template's names.

    Returns:
        The HTML.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    templates.filters["loss"] = show_loss
    library = _library() if charts else ""
    page = templates.get_template(template)
    return page.render(charts=charts, colours=COLOURS, library=library, **values)


@functools.cache
def _library() -> str:
    """The JavaScript of plotly in gzip and base64: 2 MB of 4.8."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
