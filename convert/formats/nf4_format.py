"""NF4 in checkpoints: one tensor of codes a weight and its scales beside it, as bitsandbytes saves them.

A weight is in NF4 where its quant_state is in the folder, so folders that leave some modules in 16 bits ("dynamic"
ones) just work. Reading and writing go over the codes a few rows at a time.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from convert.blocks import Block, Blocks, row_ranges, whole_groups
from convert.errors import unexpected
from convert.finite import is_finite, nonfinite, not_in
from convert.formats import nf4
from convert.formats.dynamic import dynamic_map
from convert.formats.format import Format, Stored, Values
from convert.formats.nf4 import NF4Tensor
from convert.shard import Chunk, Job
from convert.tensor_file import read_range

_OFFSET_LENGTH = 24
"""Characters of a nested offset at most, as JSON writes a float32's value in full."""


class _NF4(Format):
    label, bits, target, packed = "NF4", 4, "nf4", NF4Tensor
    methods, writable = ("bitsandbytes",), True

    def __init__(self, name: str, nested: bool):
        self.name, self.nested = name, nested
        self.rounding = float(np.diff(nf4.NF4_MAP).max()) / 2
        if nested:
            self.rounding += float(np.diff(dynamic_map()).max()) / 2

    def holds(self, stored: Stored) -> bool:
        tensors = stored.checkpoint.tensors
        return stored.name + nf4.QUANT_STATE in tensors and (stored.name + ".nested_absmax" in tensors) == self.nested

    def claims(self, name: str) -> tuple[str, ...]:
        return tuple(name + suffix for suffix in nf4.SUFFIXES)

    def decoded_dtype(self, stored: Stored) -> np.dtype:
        field = stored.name + nf4.QUANT_STATE
        file = stored.checkpoint.info(field).file
        return np.dtype(nf4.read_state(stored.checkpoint.read(field).tobytes(), file, field)["dtype"])

    def read(self, stored: Stored) -> NF4Tensor:
        return _read(stored)

    def decode(self, tensor: NF4Tensor) -> np.ndarray:
        return nf4.decode(tensor)

    def blocks(self, stored: Stored) -> Iterator[Block]:
        info, tensor = stored.info, _read(stored, codes=False)
        item = np.dtype(info.dtype).itemsize

        def codes(first: int, last: int) -> np.ndarray:
            return read_range(stored.name, info, first // item, math.ceil(last / item)).view(np.uint8)

        return _decoded(tensor, codes, 2 * item)

    def declares(self, quantization: Mapping[str, Any]) -> bool:
        nested = bool(quantization.get("bnb_4bit_use_double_quant"))
        return super().declares(quantization) and nested == self.nested

    def check_config(self, quantization: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
        if quantization.get("load_in_8bit"):
            raise unexpected(file, "quantization_config.load_in_8bit", "false (NF4 is the format that is read)", True)
        kind = quantization.get("bnb_4bit_quant_type")
        if quantization.get("load_in_4bit") and kind != "nf4":
            raise unexpected(file, "quantization_config.bnb_4bit_quant_type", "'nf4'", kind)

    def made(self, tensor: Any) -> bool:
        return isinstance(tensor, NF4Tensor) and tensor.nested == self.nested

    def to_tensors(self, name: str, tensor: NF4Tensor) -> dict[str, np.ndarray]:
        return nf4.to_tensors(name, tensor)

    def quantization_config(self, dtype: str, skipped: list[str], storage_dtype: str = "uint8") -> dict[str, Any]:
        return nf4.quantization_config(dtype, skipped, nested=self.nested, storage_dtype=storage_dtype)

    def job(self, values: Values) -> Job:
        source, name, blocks, shape, dtype, _ = values
        count, state = math.prod(shape), name + nf4.QUANT_STATE
        scales = np.zeros(math.ceil(count / nf4.BLOCK), np.float32)
        empty = NF4Tensor(np.empty(0, np.uint8), scales, nf4.NF4_MAP, shape, dtype.name)
        sample = self._with_scales(name, empty)
        outputs = {key: (array.dtype, array.shape) for key, array in sample.items()}
        outputs[name] = np.dtype(np.uint8), (math.ceil(count / 2), 1)
        if self.nested:  # as long as the longest offset
            outputs[state] = np.dtype(np.uint8), (len(sample[state]) + _OFFSET_LENGTH - len("0.0"),)

        def run() -> Iterator[Chunk]:
            scales = []
            for first, flat in whole_groups(blocks(), nf4.BLOCK):
                rounded = values.rounded(flat)
                if not is_finite(rounded):
                    raise nonfinite(source, name, where=f"where {dtype} cannot hold them", way_out=not_in(self.label))
                part = nf4.encode(rounded)
                scales.append(part.absmax)
                yield Chunk(name, first // 2, part.codes)
            tensor = dataclasses.replace(empty, absmax=np.concatenate(scales))
            for key, array in self._with_scales(name, tensor).items():
                if key == state and self.nested:
                    array = np.concatenate([array, np.full(outputs[state][1][0] - len(array), ord(" "), np.uint8)])
                yield Chunk(key, 0, np.ascontiguousarray(array).reshape(-1))

        return Job(outputs, run, source)

    def _with_scales(self, name: str, tensor: NF4Tensor) -> dict[str, np.ndarray]:
        """The tensors of a weight but for its codes, from scales in float32."""
        tensors = nf4.to_tensors(name, nf4.nest(tensor) if self.nested else tensor)
        del tensors[name]
        return tensors


def through_nf4(
    source: str | os.PathLike[str], name: str, blocks: Blocks, shape: tuple[int, ...], dtype: np.dtype
) -> Blocks:
    """The values of a weight after quantisation to NF4 (nested) and decoding.

    Args:
        source: The folder it comes from, for messages.
        name: The weight's.
        blocks: Its values.
        shape: Its shape.
        dtype: Of the weight.
    """

    def run() -> Iterator[Block]:
        job = NF4_NESTED.job(Values(source, name, blocks, shape, dtype))
        arrays = {key: np.empty(math.prod(size), kind) for key, (kind, size) in job.outputs.items()}
        for part in job.run():
            arrays[part.name][part.first : part.first + part.values.size] = part.values
        tensor = nf4.from_tensors(name, arrays, source)
        yield from _decoded(tensor, lambda first, last: tensor.codes[first:last])

    return run


def _decoded(tensor: NF4Tensor, codes: Callable[[int, int], np.ndarray], group: int = 2) -> Iterator[Block]:
    """The values of a weight as blocks, from its scales and the codes' bytes in a range."""
    columns, scales = math.prod(tensor.shape[1:]), nf4.decode_absmax(tensor)
    for begin, end in row_ranges(tensor.shape, math.lcm(tensor.blocksize, nf4.BLOCK, group)):
        first, last = begin * columns, end * columns
        part = NF4Tensor(
            codes(first // 2, math.ceil(last / 2)),
            scales[first // tensor.blocksize : math.ceil(last / tensor.blocksize)],
            tensor.quant_map,
            (end - begin, columns),
            tensor.dtype,
            tensor.blocksize,
        )
        yield nf4.decode(part).astype(np.float32, copy=False)


def _read(stored: Stored, *, codes: bool = True) -> NF4Tensor:
    """The whole weight; without `codes` it has none."""
    checkpoint, name = stored.checkpoint, stored.name
    file = checkpoint.info(name + nf4.QUANT_STATE).file
    names = [name + suffix for suffix in nf4.SUFFIXES if name + suffix in checkpoint.tensors]
    parts = {part: checkpoint.read(part) for part in names if codes or part != name}
    if not codes:
        parts[name] = np.zeros(stored.info.shape, np.dtype(stored.info.dtype))  # never touched, so it takes no memory
    tensor = nf4.from_tensors(name, parts, file)
    if tensor.shape != stored.shape:
        raise unexpected(file, f"{name}: shape", str(list(stored.shape)), list(tensor.shape))
    return tensor if codes else dataclasses.replace(tensor, codes=np.empty(0, np.uint8))


NF4, NF4_NESTED = _NF4("nf4", False), _NF4("nf4-nested", True)
