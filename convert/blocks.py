"""A tensor in float32, a few rows at a time, whatever its format; and from such blocks back to a file's format.

A block is float32 [rows, columns], a vector has one column. Blocks come in order and hold whole rows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from convert.checkpoint import Checkpoint
from convert.finite import NOT_IN_NF4, is_finite, nonfinite
from convert.formats import fp8, nf4
from convert.model.spec import WeightSpec
from convert.shard import Job, Part
from convert.tensor_file import TensorInfo, read_range
from convert.weights import Weights

Block = np.ndarray
Blocks = Callable[[], Iterator[Block]]
ELEMENTS = 2**18  # in a block: 1 MiB in float32, which stays in the cache


def row_ranges(shape: Sequence[int], group: int = nf4.BLOCK) -> Iterator[tuple[int, int]]:
    """First and last row of each block: about `ELEMENTS` elements, a multiple of `group` but in the last.

    Args:
        shape: Of the tensor.
        group: Elements that must not be torn apart.
    """
    rows, columns = shape[0], math.prod(shape[1:])
    step = group // math.gcd(columns, group)
    step *= max(1, ELEMENTS // (step * max(columns, 1)))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def stored_blocks(weights: Weights, path: str) -> Blocks:
    """A tensor of a model folder as blocks.

    4-bit and 8-bit weights come with the values that a model computes with: rounded to the dtype they decode to.

    Args:
        weights: The matched folder.
        path: The tensor's path in the tree.
    """
    row, kind = weights.specs[path], weights.format(path)
    if kind.startswith("nf4"):
        return lambda: _nf4_blocks(weights, path)
    info = weights.checkpoint.info(row.name)
    if kind == "fp8":
        return lambda: _fp8_blocks(weights, row, info)
    return lambda: array_blocks(row.name, info)


def array_blocks(name: str, info: TensorInfo, first: int = 0) -> Iterator[Block]:
    """An array of 16 or 32 bits as blocks.

    Args:
        name: Its name, for messages.
        info: Where it lies.
        first: The row to begin with.
    """
    columns = math.prod(info.shape[1:])
    for begin, end in row_ranges((info.shape[0] - first, columns)):
        values = read_range(name, info, (first + begin) * columns, (first + end) * columns)
        yield values.astype(np.float32, copy=False).reshape(-1, columns)


def _nf4_blocks(weights: Weights, path: str) -> Iterator[Block]:
    """NF4 as bitsandbytes decodes it; the codes are read block by block."""
    row = weights.specs[path]
    tensor = weights.read_packed(path, codes=False)
    info = weights.checkpoint.info(row.name)
    item = np.dtype(info.dtype).itemsize
    columns = math.prod(tensor.shape[1:])
    group = math.lcm(tensor.blocksize, nf4.BLOCK, 2 * item)
    scales = nf4.decode_absmax(tensor)
    for begin, end in row_ranges(tensor.shape, group):
        first, last = begin * columns, end * columns
        codes = read_range(row.name, info, first // (2 * item), math.ceil(math.ceil(last / 2) / item))
        part = dataclasses.replace(
            tensor,
            codes=codes.view(np.uint8),
            absmax=scales[first // tensor.blocksize : math.ceil(last / tensor.blocksize)],
            nested_absmax=None,
            nested_quant_map=None,
            nested_offset=None,
            shape=(end - begin, columns),
        )
        yield nf4.decode(part).astype(np.float32, copy=False)


def _fp8_blocks(weights: Weights, row: WeightSpec, info: TensorInfo) -> Iterator[Block]:
    scale, dtype = weights.fp8_scale(row), weights.decoded_dtype(row.path)
    for begin, end in row_ranges(row.shape):
        codes = read_range(row.name, info, begin * row.shape[1], end * row.shape[1]).reshape(-1, row.shape[1])
        yield fp8.decode(codes, scale, begin).astype(dtype).astype(np.float32)


def copied(checkpoint: Checkpoint, names: Sequence[str]) -> Job:
    """Tensors taken over byte for byte.

    Args:
        checkpoint: The folder they are in.
        names: Theirs.
    """
    infos = {name: checkpoint.info(name) for name in names}

    def run() -> Iterator[Part]:
        for name, info in infos.items():
            count = math.prod(info.shape)
            for first in range(0, count, 2 * ELEMENTS):
                yield Part(name, first, read_range(name, info, first, min(first + 2 * ELEMENTS, count)))

    outputs = {name: (np.dtype(info.dtype), info.shape) for name, info in infos.items()}
    return Job(outputs, run, infos[names[0]].file)


def plain(source: Path, name: str, blocks: Blocks, shape: tuple[int, ...], dtype: np.dtype) -> Job:
    """Blocks rounded once, to the nearest value of a dtype.

    Args:
        source: The folder it comes from, for messages.
        name: The tensor's.
        blocks: Its values.
        shape: Its shape.
        dtype: float32, bfloat16 or float16.
    """

    def run() -> Iterator[Part]:
        first = 0
        for block in blocks():
            with np.errstate(over="ignore"):  # what overflows is found as infinity
                values = block.astype(dtype, copy=False).reshape(-1)
            yield Part(name, first, values)
            first += values.size

    return Job({name: (dtype, shape)}, run, source)


def quantized(source: Path, name: str, blocks: Blocks, shape: tuple[int, ...], dtype: np.dtype, nested: bool) -> Job:
    """Blocks rounded to a dtype, then to NF4 as bitsandbytes does it.

    Args:
        source: The folder it comes from, for messages.
        name: The weight's.
        blocks: Its values.
        shape: Its shape.
        dtype: What it decodes to: float32, bfloat16 or float16.
        nested: Quantise the scales too.
    """
    count = math.prod(shape)
    codes = np.dtype(np.uint8), (math.ceil(count / 2), 1)
    empty = nf4.NF4Tensor(np.empty(0, np.uint8), np.zeros(math.ceil(count / nf4.BLOCK), np.float32), nf4.NF4_MAP,
                          shape, dtype.name)  # fmt: skip
    sample = nf4.to_tensors(name, nf4.nest(empty) if nested else empty)
    del sample[name]
    state = name + nf4.QUANT_STATE
    outputs = {key: (array.dtype, array.shape) for key, array in sample.items()} | {name: codes}
    if nested:  # as long as the longest offset
        outputs[state] = (np.dtype(np.uint8), (len(sample[state]) + _OFFSET_LENGTH - len("0.0"),))

    def run() -> Iterator[Part]:
        scales = []
        for first, values in whole_groups(blocks(), nf4.BLOCK):
            with np.errstate(over="ignore"):
                values = values.astype(dtype, copy=False)
            if not is_finite(values):
                raise nonfinite(source, name, where=f"where {dtype} cannot hold them", way_out=NOT_IN_NF4)
            part = nf4.encode(values)
            scales.append(part.absmax)
            yield Part(name, first // 2, part.codes)
        tensor = dataclasses.replace(empty, absmax=np.concatenate(scales))
        for key, array in nf4.to_tensors(name, nf4.nest(tensor) if nested else tensor).items():
            if key == state and nested:
                array = np.concatenate([array, np.full(outputs[state][1][0] - len(array), ord(" "), np.uint8)])
            if key != name:
                yield Part(key, 0, np.ascontiguousarray(array).reshape(-1))

    return Job(outputs, run, source)


#: Characters of a nested offset at most, as JSON writes a float32's value in full.
_OFFSET_LENGTH = 24


def whole_groups(blocks: Iterable[Block], group: int) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks as flat arrays that are multiples of a group, but the last; with the index of their first element.

    Args:
        blocks: In order.
        group: Elements.
    """
    first, left = 0, np.empty(0, np.float32)
    for block in blocks:
        flat = block.reshape(-1) if not left.size else np.concatenate([left, block.reshape(-1)])
        whole = flat.size - flat.size % group
        if whole:
            yield first, flat[:whole]
        first, left = first + whole, flat[whole:].copy()
    if left.size:
        yield first, left


def through_nf4(source: Path, name: str, blocks: Blocks, shape: tuple[int, ...], dtype: np.dtype) -> Blocks:
    """The values that are left of a weight when it is quantised to NF4 (nested) and decoded again.

    Args:
        source: The folder it comes from, for messages.
        name: The weight's.
        blocks: Its values.
        shape: Its shape.
        dtype: That it is held in.
    """

    def run() -> Iterator[Block]:
        parts = []
        for _, values in whole_groups(blocks(), nf4.BLOCK):
            if not is_finite(values):
                raise nonfinite(source, name, way_out=NOT_IN_NF4)
            parts.append(nf4.encode(values.astype(dtype, copy=False)))
        scales = np.concatenate([part.absmax for part in parts])
        tensor = nf4.nest(nf4.NF4Tensor(np.empty(0, np.uint8), scales, nf4.NF4_MAP, shape, dtype.name))
        scales, codes = nf4.decode_absmax(tensor), np.concatenate([part.codes for part in parts])
        columns = math.prod(shape[1:])
        for begin, end in row_ranges(shape):
            first, last = begin * columns, end * columns
            part = nf4.NF4Tensor(
                codes[first // 2 : math.ceil(last / 2)],
                scales[first // nf4.BLOCK : math.ceil(last / nf4.BLOCK)],
                nf4.NF4_MAP,
                (end - begin, columns),
                dtype.name,
            )
            yield nf4.decode(part).astype(np.float32, copy=False)

    return run
