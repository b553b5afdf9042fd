"""Weights' formats on disk, bit for bit: the one table of them."""

from typing import Any

from convert.formats.format import Format, StackedTensor, Stored
from convert.formats.fp8 import FP8
from convert.formats.mxfp4 import MXFP4
from convert.formats.nf4_format import NF4, NF4_NESTED
from convert.formats.plain import FLOATS, PLAIN

__all__ = ["FLOATS", "FORMATS", "Format", "StackedTensor", "Stored", "format_of", "format_of_tensor"]

#: Name -> format.
FORMATS: dict[str, Format] = {form.name: form for form in (*PLAIN, NF4, NF4_NESTED, FP8, MXFP4)}


def format_of(stored: Stored) -> Format | None:
    """The format of a weight in a checkpoint; None for an unknown one. Nothing is read."""
    # Packed ones first: codes may lie in tensors of a plain dtype.
    forms = sorted(FORMATS.values(), key=lambda form: form.plain)
    names = stored.checkpoint.tensors
    return next((form for form in forms if form.codes_name(stored.name) in names and form.holds(stored)), None)


def format_of_tensor(tensor: Any) -> Format | None:
    """The packed format of a tensor in memory; None for a plain array."""
    if isinstance(tensor, StackedTensor):
        return format_of_tensor(tensor.tensors[0])
    return next((form for form in FORMATS.values() if not form.plain and form.made(tensor)), None)
