"""The largest arrays of a compiled step, named by the operations that make them."""

import re
from typing import NamedTuple

from fastjax.planning.hlo import kernels, size

#: Parts of an operation's name that JAX's transformations add.
_GENERIC = re.compile(r"(jit\(step\)|jvp\(\)|while|body|eval_jaxpr|closed_call|checkpoint|rematted_computation)")


class LargeArray(NamedTuple):
    """An array that a step makes.

    Attributes:
        type: its dtype and shape, as "bf16[32,4,2048,4096]".
        scope: the operation that makes it.
        bytes: its size.
    """

    type: str
    scope: str
    bytes: int

    def __str__(self) -> str:
        """In words."""
        return f"{self.bytes / 2**30:.2f} GiB {self.type} of {self.scope}"


def largest_arrays(text: str, count: int) -> list[LargeArray]:
    """The largest arrays of a program, each type once.

    Args:
        text: `compiled.as_text()`.
        count: at most so many.
    """
    found: dict[str, LargeArray] = {}
    for kernel in kernels(text):
        for type_ in re.findall(r"\w+\[[\d,]*\]", kernel.result):
            found.setdefault(type_, LargeArray(type_, _short(kernel.scope), size(type_)))
    return sorted(found.values(), key=lambda array: -array.bytes)[:count]


def _short(scope: str) -> str:
    """The telling part of an operation's name."""
    passes = "backward" if "transpose(" in scope else "forward"
    parts = [
        part for part in re.sub(r"transpose\(|\)\)+", "/", scope).split("/") if part and not _GENERIC.fullmatch(part)
    ]
    return f"{'/'.join(parts[-3:]) or scope} ({passes})"
