"""Kernels of a trace by kind: names without their numbers."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastjax.bench.timing import Row
from fastjax.bench.trace import Kernel, busy_ns, read_kernels

_SHOWN, _WIDTH = 12, 44


class Kinds(NamedTuple):
    """Kernels of a token of every row, by kind.

    Attributes:
        kernels: that ran, and copies.
        busy: seconds in which at least one of them ran.
        kinds: those that take most, and the rest as "others": rows with name, kernels, microseconds and share.
    """

    kernels: float
    busy: float
    kinds: list[Row]


def kinds_of(folder: Path, tokens: float) -> Kinds | None:
    """Read a trace; None: it has no kernels, as of a CPU.

    Args:
        folder: of the trace.
        tokens: of a row in it.
    """
    found = read_kernels(folder)
    if not found:
        return None
    by: dict[str, list[Kernel]] = {}
    for kernel in found:
        by.setdefault(kind_of(kernel.name), []).append(kernel)
    ordered = sorted(by.items(), key=lambda item: -_nanoseconds(item[1]))
    others = [kernel for _, kernels in ordered[_SHOWN:] for kernel in kernels]
    rows = [*ordered[:_SHOWN], *([("others", others)] if others else [])]
    total = _nanoseconds(found)
    kinds = [
        {
            "kind": name,
            "kernels": len(kernels) / tokens,
            "microseconds": _nanoseconds(kernels) * 1e-3 / tokens,
            "share": _nanoseconds(kernels) / total,
            "reason": None,
        }
        for name, kernels in rows
    ]
    return Kinds(len(found) / tokens, busy_ns(found) * 1e-9 / tokens, kinds)


def kind_of(name: str) -> str:
    """The name of a kernel without its numbers and parameters, by which kernels of one kind are equal.

    Args:
        name: as in a trace.
    """
    bare = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
    return re.sub(r"[_.]\d+(x\d+)*(?=[_.]|$)", "", bare)[:_WIDTH]


def _nanoseconds(kernels: Sequence[Kernel]) -> float:
    return sum(kernel.end - kernel.start for kernel in kernels)
