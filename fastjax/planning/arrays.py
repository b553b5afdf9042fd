"""The largest arrays of a compiled step, named by the operations that make them."""

import re
from typing import NamedTuple

from fastjax.planning.hlo import IN_HOST, kernels, size

#: Parts of an operation's name that JAX's transformations add.
_GENERIC = re.compile(r"jit\(step\)|while|body|eval_jaxpr|closed_call|checkpoint|rematted_computation")
_WRAPPED = re.compile(r"(?:jvp|transpose)\(([^()]*)\)")

#: Types of arrays that are not in the host's memory.
_ON_DEVICE = re.compile(rf"\w+\[[\d,]*\](?!{re.escape(IN_HOST)})")

#: Operations that move what others have made, or make room for it.
_COPIES = ("dynamic_update_slice", "dynamic_slice", "broadcast_in_dim", "copy", "empty")


class LargeArray(NamedTuple):
    """An array that a step makes.

    Attributes:
        type: its dtype and shape, as "bf16[32,4,2048,4096]".
        scope: the operation that makes it, or makes a layer's part of it.
        bytes: its size.
    """

    type: str
    scope: str
    bytes: int

    def __str__(self) -> str:
        """In words."""
        return f"{self.bytes / 2**30:.2f} GiB {self.type} of {self.scope}"


def largest_arrays(text: str, count: int) -> list[LargeArray]:
    """The largest arrays of a program on the device, each type once.

    Args:
        text: `compiled.as_text()`.
        count: at most so many.
    """
    arrays: dict[str, LargeArray] = {}
    parts: dict[tuple[str, str, int], str] = {}
    for kernel in kernels(text):
        for type_ in _ON_DEVICE.findall(kernel.result):
            whole = size(type_)
            arrays.setdefault(type_, LargeArray(type_, _short(kernel.scope), whole))
            if kernel.times > 1 and not any(copied in kernel.scope for copied in _COPIES):
                parts.setdefault((*_ends(type_), whole * kernel.times), _short(kernel.scope))
    largest = sorted(arrays.values(), key=lambda array: -array.bytes)[:count]
    # What a loop stacks begins as room, or as zeros, and is named by what each turn puts into it.
    return [one._replace(scope=parts.get((*_ends(one.type), one.bytes), one.scope)) for one in largest]


def _ends(type_: str) -> tuple[str, str]:
    """Dtype and last dimension."""
    dtype, _, dims = type_.removesuffix("]").partition("[")
    return dtype, dims.rpartition(",")[2]


def _short(scope: str) -> str:
    """The telling part of an operation's name."""
    passes = "backward" if "transpose(" in scope else "forward"
    while (plain := _WRAPPED.sub(r"\1", scope)) != scope:
        scope = plain
    parts = [part for part in scope.split("/") if part and not _GENERIC.fullmatch(part)]
    return f"{'/'.join(parts[-3:]) or scope} ({passes})"
