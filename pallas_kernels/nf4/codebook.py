"""The sixteen NF4 values, the dynamic 8-bit map of their scales, and how codes are packed.

NF4 (QLoRA, arXiv 2305.14314) stores a weight in blocks of 64 consecutive elements of the row-major matrix: a 4-bit code
an element and one float32 scale a block, the block's absolute maximum. Element = NF4_VALUES[code] · absmax, computed in
float32 and rounded once to the wanted dtype. "Nested" scales are quantised too, in blocks of 256, to 8-bit codes of the
dynamic map (arXiv 1511.04561) after their mean is taken off.

Two orders of the same codes in the same number of bytes:

- "bitsandbytes": byte b holds elements 2b (high nibble) and 2b + 1 (low nibble), as checkpoints store them; blocks may
  cross rows and the last one may be partial;
- "split": byte j of each block's 32 holds elements j (low nibble) and j + 32 (high nibble), so that both halves of a
  decoded block are contiguous without shuffling; whole blocks only.
"""

import numpy as np

BLOCK = 64
BLOCK_BYTES = BLOCK // 2
NESTED_BLOCK = 256
ORDERS = ("bitsandbytes", "split")


def _constant(values) -> np.ndarray:
    array = np.array(values, np.float32)
    array.flags.writeable = False
    return array


NF4_VALUES = _constant(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)


def _dynamic_map() -> np.ndarray:
    """Seven decades, each with twice the points of the one below, both signs, and 0 and 1.

    The points are the midpoints of `torch.linspace(0.1, 1, …)`, which counts from the nearer end.
    """
    values = [0.0, 1.0]
    start, end = np.float32(0.1), np.float32(1.0)
    for decade in range(7):
        intervals = 2**decade
        step = np.float64((end - start) / np.float32(intervals))
        index = np.arange(intervals + 1)
        edges = np.where(index < (intervals + 1) // 2, start + step * index, end - step * (intervals - index))
        edges = edges.astype(np.float32)
        middles = np.float32(10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [*middles.tolist(), *(-middles).tolist()]
    return _constant(sorted(values))


DYNAMIC_MAP = _dynamic_map()


def num_blocks(shape: tuple[int, int]) -> int:
    """Blocks of a matrix; the last one may be partial."""
    return -(-shape[0] * shape[1] // BLOCK)


def num_bytes(shape: tuple[int, int]) -> int:
    """Bytes of a matrix's codes in bitsandbytes' order; the last byte may hold one code."""
    return -(-shape[0] * shape[1] // 2)
