"""The figures of a measured generation as tables on the terminal."""

from collections.abc import Sequence

from rich.console import Console

from fastjax.bench.generate.settings import GenerateSettings
from fastjax.bench.tables import Number, print_rows
from fastjax.bench.timing import Row

#: Whose figures they are that are not another library's.
OURS = "fastjax"
_WORDS = {"by": "by", "r": "r", "loop": "layer_loop", "cache": "cache_dtype"}
_RATE: dict[str, Number] = {"rows": ("rows", ",d"), "tokens/s": ("tokens_per_second", ",.0f")}
_MEMORY: dict[str, Number] = {"compile s": ("compile_seconds", ",.1f"), "peak GiB": ("gib", ",.2f")}
#: Case → title, and its own columns.
_CASES: dict[str, tuple[str, dict[str, Number]]] = {
    "decode": (
        "steady decoding",
        {
            **_RATE,
            "ms": ("milliseconds", ",.2f"),
            "context": ("context", ",.0f"),
            "slower": ("slower", ".1%"),
            **_MEMORY,
        },
    ),
    "prefill": ("prefill", {**_RATE, "tokens": ("tokens", ",d"), "ms": ("milliseconds", ",.1f"), **_MEMORY}),
    "log_probs": (
        "log-probabilities beside the training forward pass, nats",
        {"rows": ("rows", ",d"), "tokens": ("tokens", ",d"), "largest": ("largest", ".2e"), "mean": ("mean", ".2e")},
    ),
    "requests": (
        "mixed requests",
        {
            **_RATE,
            "requests": ("requests", ",d"),
            "s": ("seconds", ",.1f"),
            "over alone": ("over_alone", ".2f"),
            "compiled": ("compilations", ",d"),
            **_MEMORY,
        },
    ),
}
_KINDS: dict[str, Number] = {"kernels": ("kernels", ",.1f"), "µs": ("microseconds", ",.1f"), "share": ("share", ".1%")}


def with_slowdown(rows: Sequence[Row]) -> list[Row]:
    """The rows with `slower`: what adapters cost of the speed without, where that is measured; else None.

    Args:
        rows: of all cases.
    """
    keys = ("by", "case", "rows", "layer_loop", "cache_dtype")
    bare = {tuple(row[key] for key in keys): row for row in rows if row["r"] == 0 and row["reason"] is None}
    found = []
    for row in rows:
        other = bare.get(tuple(row[key] for key in keys)) if row["r"] and row["reason"] is None else None
        before = None if other is None else other.get("tokens_per_second")
        found.append({**row, "slower": before and 1 - row["tokens_per_second"] / before})
    return found


def print_results(console: Console, settings: GenerateSettings, rows: Sequence[Row]) -> None:
    """Print a table for each kind of case, and one of kernels for each trace.

    Args:
        console: where to.
        settings: of the measurement.
        rows: of `with_slowdown`.
    """
    for case, (title, numbers) in _CASES.items():
        of_case = [_shown(row, numbers) for row in rows if row["case"] == case]
        if not of_case:
            continue
        words = {name: key for name, key in _WORDS.items() if name == "r" or len({row[key] for row in of_case}) > 1}
        present = {
            name: column for name, column in numbers.items() if any(row[column[0]] is not None for row in of_case)
        }
        device = next((row["device"] for row in of_case if row.get("device")), "")
        about = (title, f"{settings.model}, NF4", device, f"jax {of_case[0]['jax']}")
        print_rows(console, " · ".join(about), of_case, words, present)
    for row in rows:
        if row.get("kinds"):
            title = f"kernels of a token · {row['rows']} rows · r={row['r']} · {row['layer_loop']}"
            busy = (
                f"{row['kernels']:,.0f} kernels, busy {1e3 * row['busy_seconds']:.2f} of {row['milliseconds']:.2f} ms"
            )
            print_rows(console, title, row["kinds"], {"kind": "kind"}, _KINDS, busy)


def line_of(row: Row) -> str:
    """A row in a line, as it is measured."""
    words = [row["by"], row["case"].replace("_", " "), f"{row['rows']} rows", f"r={row['r']}"]
    words += [str(row[key]) for key in ("layer_loop", "cache_dtype") if row[key]]
    figures = {
        "tokens_per_second": "{:,.0f} tokens/s",
        "largest": "largest {:.2e}",
        "over_alone": "{:.2f} of its parts",
    }
    told = [form.format(row[key]) for key, form in figures.items() if row.get(key) is not None]
    return f"{' '.join(words)}: {row['reason'] or ', '.join(told)}"


def _shown(row: Row, numbers: dict[str, Number]) -> Row:
    """The row with every column, None where it has no figure."""
    columns = dict.fromkeys(key for key, _ in numbers.values())
    peak = row.get("peak_bytes")
    return {**columns, **row, "gib": peak and peak / 2**30, "by": row["by"].partition(" ")[0]}
