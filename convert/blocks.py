"""A tensor in float32, a few rows at a time, whatever its format; and bytes that are copied as they are.

A block is float32 [rows, columns], a vector has one column. Blocks come in order and hold whole rows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from convert.checkpoint import Checkpoint
from convert.shard import Chunk, Job
from convert.tensor_file import TensorInfo, read_range

Block = np.ndarray
Blocks = Callable[[], Iterator[Block]]
ELEMENTS = 2**18  # in a block: 1 MiB in float32, which stays in the cache
GROUP = 64  # elements that quantisation takes together


def row_ranges(shape: Sequence[int], group: int = GROUP) -> Iterator[tuple[int, int]]:
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


def in_blocks(values: np.ndarray) -> Iterator[Block]:
    """An array in memory as blocks."""
    rows = values.reshape(len(values), -1)
    for begin, end in row_ranges(rows.shape):
        yield rows[begin:end].astype(np.float32, copy=False)


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


def copied(checkpoint: Checkpoint, names: Sequence[str]) -> Job:
    """Tensors taken over byte for byte.

    Args:
        checkpoint: The folder they are in.
        names: Theirs.
    """
    infos = {name: checkpoint.info(name) for name in names}

    def run() -> Iterator[Chunk]:
        for name, info in infos.items():
            count = math.prod(info.shape)
            for first in range(0, count, 2 * ELEMENTS):
                yield Chunk(name, first, read_range(name, info, first, min(first + 2 * ELEMENTS, count)))

    outputs = {name: (np.dtype(info.dtype), info.shape) for name, info in infos.items()}
    return Job(outputs, run, infos[names[0]].file)


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
