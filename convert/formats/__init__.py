"""Weights' formats on disk, bit for bit: the one table of them."""

from typing import Any

from convert.formats.eight_bits_format import EIGHT_BITS_WRITERS, INT8, INT8_PACKED
from convert.formats.format import Format, StackedTensor, Stored, Values, Writer
from convert.formats.fp4_format import FP4_WRITERS, MXFP4_ROWS, NVFP4, NVFP4_MODELOPT
from convert.formats.fp8 import FP8
from convert.formats.int4_format import INT4, INT4_BYTES, INT4_WRITERS
from convert.formats.mxfp4 import MXFP4
from convert.formats.nf4_format import NF4, NF4_NESTED
from convert.formats.plain import FLOATS, PLAIN

__all__ = [
    "FLOATS",
    "FORMATS",
    "WRITERS",
    "Format",
    "StackedTensor",
    "Stored",
    "Values",
    "Writer",
    "format_of",
    "format_of_tensor",
]

_PACKED = (NF4, NF4_NESTED, FP8, MXFP4, INT4_BYTES, INT8_PACKED, INT8, INT4, NVFP4, NVFP4_MODELOPT, MXFP4_ROWS)
#: Name -> format of weights in folders.
FORMATS: dict[str, Format] = {form.name: form for form in (*PLAIN, *_PACKED)}
#: Name of a scheme -> what quantises a folder's matrices to it.
WRITERS: dict[str, Writer] = {
    NF4_NESTED.target: NF4_NESTED,
    **{writer.name: writer for writer in (*INT4_WRITERS, *EIGHT_BITS_WRITERS, *FP4_WRITERS)},
}


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
