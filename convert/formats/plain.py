"""Plain arrays of 16 or 32 bits."""

import math
from collections.abc import Iterator

import numpy as np

from convert.blocks import Block, array_blocks
from convert.checkpoint import CONFIG
from convert.formats.format import Format, Stored, Values
from convert.shard import Chunk, Job
from convert.tensor_file import DTYPES, read_range


class _Plain(Format):
    packed, writable, shared_experts = np.ndarray, True, True

    def __init__(self, name: str, code: str):
        self.name = self.label = self.target = name
        self.dtype = DTYPES[code]
        self.bits = 8 * self.dtype.itemsize

    def holds(self, stored: Stored) -> bool:
        return stored.info.dtype == self.name

    def misfit(self, stored: Stored) -> str | None:
        info = stored.info
        if info.shape == stored.shape:
            return None
        return f"expected {list(stored.shape)} from {CONFIG}, got {list(info.shape)} in {info.file.name}"

    def claims(self, name: str) -> tuple[str, ...]:
        return (name,)

    def decoded_dtype(self, stored: Stored) -> np.dtype:
        return self.dtype

    def read(self, stored: Stored) -> np.ndarray:
        return stored.checkpoint.read(stored.name)

    def decode(self, tensor: np.ndarray) -> np.ndarray:
        return tensor

    def expert(self, stored: Stored, number: int) -> np.ndarray:
        shape = stored.shape[1:]
        size = math.prod(shape)
        return read_range(stored.name, stored.info, number * size, (number + 1) * size).reshape(shape)

    def blocks(self, stored: Stored) -> Iterator[Block]:
        return array_blocks(stored.name, stored.info)

    def job(self, values: Values) -> Job:
        def run() -> Iterator[Chunk]:
            first = 0
            for block in values.blocks():
                flat = values.rounded(block).reshape(-1)
                yield Chunk(values.name, first, flat)
                first += flat.size

        return Job({values.name: (values.dtype, values.shape)}, run, values.source)


PLAIN = (_Plain("float32", "F32"), _Plain("bfloat16", "BF16"), _Plain("float16", "F16"))
FLOATS = tuple(form.name for form in PLAIN)
