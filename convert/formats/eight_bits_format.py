"""FP8 and int8 in checkpoints of compressed-tensors: ``float-quantized`` and ``int-quantized``.

Reading FP8 is `convert.formats.fp8`'s, which knows other libraries' folders too. Both formats are for servers that
quantise activations too, to the same eight bits, for each token; the weights say the same with and without that.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int8 as Int8Codes

from convert.formats import eight_bits, fp8
from convert.formats.compressed import Compressed, misfits, part
from convert.formats.compressed_writer import Arrays, CompressedWriter
from convert.formats.eight_bits import Codes
from convert.formats.format import Stored
from convert.formats.fp8 import Scale
from convert.formats.scales import divided

SCALE = "_scale"
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
        """Of the weight."""
        return self.codes.shape


class _Int8(Compressed):
    name, label, target = "int8", "INT8", "int8"
    bits, packed, kind = 8, Int8Tensor, ("int", 8, None)
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


class _EightBitsWriter(CompressedWriter):
    bits = 8

    def __init__(self, name: str, label: str, codes: Codes, layout: str):
        self.name, self.label, self.codes, self.layout = name, label, codes, layout
        self.block, self.whole = _BLOCKS[layout], layout == "tensor"
        self.rows_together = self.block[0] if layout == "block" else 1

    def described(self, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        blocks = tuple(math.ceil(size / side) for size, side in zip(shape, self.block, strict=True))
        return {"": (self.codes.dtype, shape), SCALE: (dtype, (1,) if self.whole else blocks)}

    def once(self, shape: tuple[int, ...], dtype: np.dtype, top: np.float32) -> Arrays:
        return {SCALE: divided(np.full(1, top), self.codes.steps, dtype).astype(dtype)} if self.whole else {}

    def encoded(self, values: np.ndarray, dtype: np.dtype, top: np.float32) -> Arrays:
        block = min(self.block[0], values.shape[0]), min(self.block[1], values.shape[1])
        largest = np.full((1, 1), top) if self.whole else eight_bits.largest_of(values, block)
        codes, scales = eight_bits.encode(values, largest, block, self.codes, dtype)
        return {"": codes} if self.whole else {"": codes, SCALE: scales}

    def settings(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        kind = {"num_bits": 8, "type": "int" if self.codes.dtype.kind == "i" else "float"}
        strategy = {"row": "channel", "tensor": "tensor", "block": "block"}[self.layout]
        weights, inputs = {**kind, "strategy": strategy}, {**kind, "symmetric": True, "dynamic": True}
        if self.layout == "block":
            weights["block_structure"] = list(self.block)
            inputs |= {"strategy": "group", "group_size": self.block[1]}
        else:
            inputs["strategy"] = "token"
        return f"{kind['type']}-quantized", weights, inputs


INT8 = _Int8()
EIGHT_BITS_WRITERS = (
    _EightBitsWriter("int8", "INT8", eight_bits.INT8, "row"),
    *(_EightBitsWriter(f"fp8-{layout}", "FP8", eight_bits.E4M3, layout) for layout in _BLOCKS),
)
