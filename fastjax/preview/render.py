"""The preview on a console: rows in colour, counts and lengths. Without colour targets stand in brackets."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from jaxtyping import Int
from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fastjax.data import Dataset, notes
from fastjax.preview.view import DocumentView, Piece

_BINS = 16
"""Bars of a histogram, at most."""

_PLACES = 12
"""Files and data sets of a mixture shown by name, at most."""

_STYLES = {
    (True, False): "bold green",
    (True, True): "bold green reverse",
    (False, True): "magenta",
    (False, False): "",
}
"""(learnt, special) → style."""


def legend(console: Console) -> Text:
    """The legend of the colours or brackets."""
    text = Text("what is learnt: ").append_text(_text([Piece("like this", True, False)], console))
    text.append("  the rest is only read  special tokens: ").append_text(_text([Piece("<read>", False, True)], console))
    return text.append(" ").append_text(_text([Piece("<learnt>", True, True)], console))


def show_row(documents: Sequence[DocumentView], slots: int, title: str, origin: str, console: Console) -> Group:
    """A row, document by document.

    Args:
        documents: from `view_row`.
        slots: room for tokens in the row.
        title: the row's name.
        origin: the places of its examples.
        console: the output, for its colours.
    """
    tokens, targets = sum(d.tokens for d in documents), sum(d.targets for d in documents)
    title = f"{title}: {_count(len(documents), 'document')}, {tokens:,} of {slots:,} slots, {targets:,} tokens learnt"
    parts: list[RenderableType] = [Rule(Text(title, style="bold"), style="bold", align="left")]
    parts.append(Text(origin, style="dim", overflow="fold"))
    for number, document in enumerate(documents, start=1):
        role = f" ({document.role})" if document.role else ""
        about = f"document {number}{role}: {_count(document.tokens, 'token')}, {document.targets:,} learnt"
        line = "-" if console.options.ascii_only else "╌"
        parts += [
            Rule(Text(about, style="dim"), style="dim", align="left", characters=line),
            _text(document.pieces, console),
        ]
    if tokens < slots:
        parts.append(Text(f"padding: {_count(slots - tokens, 'slot')}", style="dim"))
    return Group(*parts)


def counts(datasets: dict[str, Dataset]) -> Table:
    """The counts of the examples, a column a data set; lines of zeros are left out.

    Args:
        datasets: name → data set.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for name in datasets:
        table.add_column(name, justify="right")
    columns = [list(_lines(dataset)) for dataset in datasets.values()]
    for cells in zip(*columns, strict=True):
        label = cells[0][0]
        if any(value != "0" for _, value in cells):
            table.add_row(label, *(value for _, value in cells))
    return table


def _lines(dataset: Dataset) -> Iterator[tuple[str, str]]:
    statistics, sizes = dataset.statistics, dataset.rows.documents.lengths[dataset.rows.order]
    yield "examples", f"{statistics.examples:,}"
    yield "  nothing to learn in them, left out", f"{statistics.no_targets:,}"
    yield "  too long, truncated", f"{statistics.truncated:,}"
    yield "  too long, split into several documents", f"{statistics.split:,}"
    yield "  too long, dropped", f"{statistics.dropped:,}"
    yield "  answers in documents of their own, which the chat template rewrites", f"{statistics.apart:,}"
    yield "  answers learnt behind another text than generation's", f"{statistics.elsewhere:,}"
    for kind in notes.KINDS:
        yield f"  {notes.KINDS[kind]}", f"{statistics.notes.get(kind, (0,))[0]:,}"
    yield "  desirable answers", f"{statistics.desirable:,}"
    yield "  undesirable answers", f"{statistics.undesirable:,}"
    yield "documents", f"{statistics.documents:,}"
    yield "  tokens in one: mean", f"{sizes.mean():,.0f}"
    yield "  tokens in one: median", f"{np.median(sizes):,.0f}"
    yield "  tokens in one: most", f"{sizes.max():,}"
    yield "tokens", f"{statistics.tokens:,}"
    yield "  learnt", f"{statistics.target_tokens:,} ({statistics.target_tokens / statistics.tokens:.1%})"
    yield "rows", f"{statistics.rows:,}"


def mixture(dataset: Dataset, title: str) -> Group | None:
    """The shares of files and data sets in the documents of an epoch.

    Args:
        dataset: the data.
        title: of the table.

    Returns:
        A table; None: there is only one place.
    """
    rows = dataset.rows
    if rows.origins is None or len(rows.origins.places) < 2:
        return None
    places = rows.origins.place[rows.documents.examples[rows.order]]
    documents = np.bincount(places, minlength=len(rows.origins.places))
    tokens = np.bincount(places, rows.documents.lengths[rows.order], len(rows.origins.places))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("from", overflow="fold")
    for name in ("documents", "tokens", "share of tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    order = np.argsort(-tokens, kind="stable").tolist()
    for place in order[:_PLACES]:
        name = rows.origins.places[place].removesuffix(" row ").removesuffix(":")
        table.add_row(name, f"{documents[place]:,}", f"{tokens[place]:,.0f}", f"{tokens[place] / tokens.sum():.1%}")
    if len(order) > _PLACES:
        rest = order[_PLACES:]
        share = tokens[rest].sum() / tokens.sum()
        table.add_row(f"{len(rest):,} more", f"{documents[rest].sum():,}", f"{tokens[rest].sum():,.0f}", f"{share:.1%}")
    return Group(Text(title, style="bold"), table)


def histogram(lengths: Int[np.ndarray, " D"], title: str, console: Console) -> Group:
    """The distribution of the documents' lengths, as bars.

    Args:
        lengths: tokens of each document.
        title: of the histogram.
        console: the output, for its width.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = 1
    while longest // width - shortest // width >= _BINS:
        width *= 2
    start = shortest // width
    numbers = np.bincount(lengths // width - start)
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("right", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    room = max(10, min(60, console.width - 40))
    for index, number in enumerate(numbers.tolist(), start=start):
        first, last = max(index * width, 1), min((index + 1) * width - 1, longest)
        span = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        bar = _bar(number / int(numbers.max()) * room, console.options.ascii_only)
        table.add_row(span, Text(bar, style="cyan"), f"{number:,}", Text(f"{number / len(lengths):.1%}", style="dim"))
    return Group(Text(title, style="bold"), table)


def _bar(length: float, ascii_only: bool) -> str:
    """A bar in eighths of a column, visible unless the length is zero."""
    if ascii_only:
        return "#" * (round(length) or int(length > 0))
    whole, eighths = divmod(round(length * 8) or int(length > 0), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def _text(pieces: Sequence[Piece], console: Console) -> Text:
    ascii_only = console.options.ascii_only
    text = Text(overflow="fold")
    if console.color_system is None or console.no_color:
        left, right = ("[[", "]]") if ascii_only else ("⟦", "⟧")
        for learnt, group in groupby(pieces, key=lambda piece: piece.learnt):
            words = "".join(_visible(piece.text, ascii_only) for piece in group)
            text.append(f"{left}{words}{right}" if learnt else words)
        return text
    for piece in pieces:
        text.append(_visible(piece.text, ascii_only), style=_STYLES[piece.learnt, piece.special])
    return text


def _visible(text: str, ascii_only: bool) -> str:
    """Line ends with a sign, and control characters, which a terminal would obey, as symbols."""
    shown = []
    for character in text:
        code = ord(character)
        if character == "\n":
            shown.append("\n" if ascii_only else "↵\n")
        elif code < 32 or 127 <= code < 160:
            shown.append(f"\\x{code:02x}" if ascii_only or code >= 127 else chr(0x2400 + code))
        else:
            shown.append(character)
    return "".join(shown)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)
