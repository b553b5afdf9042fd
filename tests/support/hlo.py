"""Memory traffic of a compiled GPU program, from its text; the equations of a traced one."""

import re
from typing import NamedTuple

from jax.extend.core import jaxprs_in_params

_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1, "s8": 1, "s32": 4, "u32": 4, "pred": 1, "f8e4m3fn": 1}
_FREE = ("parameter", "get-tuple-element", "bitcast", "tuple", "constant")


class Kernel(NamedTuple):
    """One effective instruction of the entry computation.

    Attributes:
        name: its kind, or the library's or kernel's name for a custom call.
        result: its shape as text.
        moved: bytes of its operands and results.
    """

    name: str
    result: str
    moved: int


def kernels(text: str) -> list[Kernel]:
    """The instructions of the entry computation, in order."""
    found, shapes = [], {}
    for line in text[text.index("\nENTRY") :].splitlines():
        matched = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)", line)
        if matched is None:
            continue
        name, shape, kind, operands, rest = matched.groups()
        shapes[name] = shape
        if kind in _FREE:
            continue
        target = re.search(r'custom_call_target="([^"]*)"', rest)
        result = shape.split(", s8[")[0] if target else shape  # a library's workspace is behind its result
        moved = _size(result) + sum(_size(shapes.get(one, "")) for one in re.findall(r"%([\w.\-]+)", operands))
        found.append(Kernel(target[1] if target else kind, re.sub(r"\{[^}]*\}", "", result), moved))
    return found


def _size(shape: str) -> int:
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        count = 1
        for size in filter(None, dims.split(",")):
            count *= int(size)
        total += count * _BYTES.get(dtype, 0)
    return total


def equations(jaxpr):
    """Every equation of a traced program, at any depth."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inside in jaxprs_in_params(equation.params):
            yield from equations(inside)
