"""FP8 and int8 in checkpoints of compressed-tensors: ``float-quantized``, ``int-quantized`` and ``pack-quantized``.

Reading FP8 is `convert.formats.fp8`'s, which knows other libraries' folders too. Servers usually quantise inputs too,
to the same eight bits, for each token. Where they are not to, FP8 is stored as ever; int8 is packed, four codes in an
int32, as compressed-tensors has integers whose inputs stay.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Int8 as Int8Codes

from convert.formats import eight_bits, fp8
from convert.formats.compressed import Arrays, Compressed, CompressedWriter, misfits, part
from convert.formats.eight_bits import Codes
from convert.formats.format import Stored
from convert.formats.fp8 import Scale
from convert.formats.scales import divided

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
_OFFSET = 128  # of a packed code
_WHOLE = 2**31  # rows and columns: more than any matrix has
_BLOCKS: Mapping[str, tuple[int, int]] = {"row": (1, _WHOLE), "tensor": (_WHOLE, _WHOLE), "block": (128, 128)}


class Int8Tensor(NamedTuple):
    """A weight as it is stored.

    Attributes:
        codes: int8 [out, in].
        scale: Its scales, one a row.
        dtype: Of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: Int8Codes[np.ndarray, "out in"]
    scale: Scale
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.codes.shape


class _Int8(Compressed):
    name, label, target = "int8", "INT8", "int8"
    bits, packed, kind = 8, Int8Tensor, ("int", 8, None)
    rounding = 0.5 / 127.5
    suffixes = "", SCALE

    def holds(self, stored: Stored) -> bool:
        return stored.info.dtype == "int8" and stored.name + SCALE in stored.checkpoint.tensors

    def misfit(self, stored: Stored) -> str | None:
        scales = fp8.SCALE_DTYPES, [(stored.shape[0], 1)]
        return misfits(stored, {"": (("int8",), [stored.shape]), SCALE: scales})

    def rows(self, stored: Stored, first: int, last: int) -> Int8Tensor:
        scales = part(stored, SCALE, first, last).astype(np.float32)
        codes = part(stored, "", first, last)
        return Int8Tensor(codes, Scale(scales, (1, codes.shape[1])), self.decoded_dtype(stored).name)

    def decode(self, tensor: Int8Tensor) -> np.ndarray:
        return fp8.decode(tensor.codes, tensor.scale).astype(tensor.dtype)


class _PackedInt8(_Int8):
    name = "int8-packed"
    suffixes = PACKED, SCALE, SHAPE

    def holds(self, stored: Stored) -> bool:
        info = stored.checkpoint.info(stored.name + PACKED)
        matrix = len(stored.shape) == len(info.shape) == 2
        return info.dtype == "int32" and matrix and 4 * info.shape[1] == stored.shape[1]  # else four bits

    def scheme(self, stored: Stored) -> str:
        return self.name

    def declares(self, quantization: Mapping[str, Any]) -> bool:
        return super().declares(quantization) and quantization.get("format") == "pack-quantized"

    def made(self, tensor: Any) -> bool:
        return False  # the other's

    def misfit(self, stored: Stored) -> str | None:
        rows, columns = stored.shape
        expected = {
            PACKED: (("int32",), [(rows, columns // 4)]),
            SCALE: (fp8.SCALE_DTYPES, [(rows, 1)]),
            SHAPE: (("int64", "int32"), [(2,)]),
        }
        return misfits(stored, expected)

    def rows(self, stored: Stored, first: int, last: int) -> Int8Tensor:
        scales = part(stored, SCALE, first, last).astype(np.float32)
        codes = (part(stored, PACKED, first, last).view(np.uint8) ^ np.uint8(_OFFSET)).view(np.int8)
        return Int8Tensor(codes, Scale(scales, (1, codes.shape[1])), self.decoded_dtype(stored).name)


class _EightBitsWriter(CompressedWriter):
    bits = 8

    def __init__(self, name: str, label: str, codes: Codes, layout: str):
        self.name, self.label, self.codes, self.layout = name, label, codes, layout
        self.block, self.whole = _BLOCKS[layout], layout == "tensor"
        self.rows_together = self.block[0] if layout == "block" else 1
        self.inputs = ("int8" if self.integers else "fp8-128" if layout == "block" else "fp8", None)
        self.activations = self.inputs[0]

    @property
    def integers(self) -> bool:
        return self.codes.dtype.kind == "i"

    @property
    def packed(self) -> bool:
        """Whether four codes are an int32."""
        return self.integers and self.activations is None

    def serving(self, activations: str | None) -> Self:
        other = super().serving(activations)
        other.columns_together = 4 if other.packed else 1
        return other

    def once(self, shape: tuple[int, ...], dtype: np.dtype, top: np.float32) -> Arrays:
        if self.packed:
            return {SHAPE: np.asarray(shape, np.int64)}
        return {SCALE: divided(np.full(1, top), self.codes.steps, dtype).astype(dtype)} if self.whole else {}

    def encoded(self, values: np.ndarray, dtype: np.dtype, top: np.float32) -> Arrays:
        block = min(self.block[0], values.shape[0]), min(self.block[1], values.shape[1])
        largest = np.full((1, 1), top) if self.whole else eight_bits.largest_of(values, block)
        codes, scales = eight_bits.encode(values, largest, block, self.codes, dtype)
        if self.packed:
            return {PACKED: (codes.view(np.uint8) ^ np.uint8(_OFFSET)).view("<i4"), SCALE: scales}
        return {"": codes} if self.whole else {"": codes, SCALE: scales}

    def settings(self) -> tuple[str, dict[str, Any]]:
        kind = "int" if self.integers else "float"
        strategy = {"row": "channel", "tensor": "tensor", "block": "block"}[self.layout]
        blocks = {"block_structure": list(self.block)} if self.layout == "block" else {}
        form = "pack-quantized" if self.packed else f"{kind}-quantized"
        return form, {"num_bits": 8, "type": kind, "strategy": strategy, **blocks}


INT8, INT8_PACKED = _Int8(), _PackedInt8()
EIGHT_BITS_WRITERS = (
    _EightBitsWriter("int8", "INT8", eight_bits.INT8, "row"),
    *(_EightBitsWriter(f"fp8-{layout}", "FP8", eight_bits.E4M3, layout) for layout in _BLOCKS),
)
