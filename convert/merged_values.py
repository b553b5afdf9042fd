"""New values of a weight with an adapter's arrays, as blocks in float32.

LoRA (arXiv 2106.09685), rsLoRA, DoRA (arXiv 2402.09353), on matrices, on the experts of a mixture and on the embedding;
fully trained modules; separately trained rows of tokens.
"""

import functools
from collections.abc import Iterator

import numpy as np

from convert.adapter_config import scaling, tuned_name
from convert.adapters import Adapter
from convert.blocks import Block, Blocks, array_blocks
from convert.derived import Values
from convert.expert_adapters import expert_module
from convert.model.paths import WeightPath
from convert.weights import Weights

_TILE, _SMALL = 16, 2**18  # rows, and multiplications, of a product that OpenBLAS runs in one thread
_LINEAR = ("lora_A", "lora_B", "lora_magnitude_vector")
_LOOKUP = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A matrix product in pieces small enough for BLAS to compute in this thread.

    BLAS's own threads spin while waiting, five times slower beside another busy thread.

    Args:
        left: float32 [rows, rank].
        right: float32 [rank, columns].
    """
    (rows, rank), columns = left.shape, right.shape[1]
    result = np.empty((rows, columns), np.float32)
    tiled = rows - rows % _TILE
    with np.errstate(invalid="ignore", over="ignore"):  # non-finite values are found on writing
        for first in range(0, columns, max(1, _SMALL // (_TILE * rank))):
            last = min(first + max(1, _SMALL // (_TILE * rank)), columns)
            tiles = result[:tiled].reshape(-1, _TILE, columns)[:, :, first:last]
            np.matmul(left[:tiled].reshape(-1, _TILE, rank), right[:, first:last], out=tiles)
            np.matmul(left[tiled:], right[:, first:last], out=result[tiled:, first:last])
    return result


def of_adapter(adapter: Adapter, path: str) -> Blocks:
    """An array of the adapter's own, such as a module trained whole."""
    return lambda: array_blocks(path, adapter.tensors[path])


def _arrays(adapter: Adapter, module: str, kinds: tuple[str, ...]) -> list[np.ndarray | None]:
    """A module's small arrays in float32; None for missing ones."""
    paths = [WeightPath.parse(module).with_leaf(kind) for kind in kinds]
    return [adapter.read(path).astype(np.float32, copy=False) if path in adapter.tensors else None for path in paths]


def with_lora(adapter: Adapter, weights: Weights, module: str, blocks: Blocks) -> Blocks:
    """W + s·B·A, row by row; with DoRA each row rescaled to its magnitude.

    Args:
        adapter: The adapter.
        weights: The base model.
        module: Path of the matrix's module.
        blocks: W.
    """
    scale = np.float32(scaling(adapter.config, tuned_name(module, weights.family)))

    def run() -> Iterator[Block]:
        a, b, magnitude = _arrays(adapter, module, _LINEAR)
        assert a is not None and b is not None
        first = 0
        for block in blocks():
            last = first + len(block)
            delta = product(b[first:last], a)
            delta *= scale
            delta += block
            if magnitude is not None:
                norm = np.sqrt(np.einsum("ij,ij->i", delta, delta))
                delta *= (magnitude[first:last] / norm)[:, None]
            yield delta
            first = last

    return run


class ExpertAdapters:
    """Adapters on experts; the arrays of a module are read once for all its experts."""

    def __init__(self, weights: Weights, adapter: Adapter):
        self.weights, self.adapter = weights, adapter
        self.read = functools.lru_cache(4)(self._read)  # those that two threads are at

    def merged(self, path: WeightPath, base: Values) -> Values | None:
        """W + s·B·A of each expert of a projection; None without an adapter.

        Args:
            path: Of the projection's weight.
            base: W.
        """
        module, rows = expert_module(self.weights.specs, path)
        if module not in self.adapter.layouts:
            return None
        scale = np.float32(scaling(self.adapter.config, tuned_name(module, self.weights.family)))
        experts = self.weights.specs[path].shape[0]

        def values(path: str, expert: int | None) -> Blocks:
            def run() -> Iterator[Block]:
                a, b = self.read(module)
                for number in range(experts) if expert is None else (expert,):
                    first = rows.start
                    for block in base(path, number)():
                        delta = product(b[number, first : first + len(block)], a[number])
                        delta *= scale
                        delta += block
                        yield delta
                        first += len(block)

            return run

        return values

    def _read(self, module: WeightPath) -> list[np.ndarray]:
        return [array for array in _arrays(self.adapter, module, _LINEAR[:2]) if array is not None]


def with_lookup_lora(adapter: Adapter, weights: Weights, module: str, blocks: Blocks) -> Blocks:
    """W + s·(B·A)ᵀ; with DoRA each column rescaled to its magnitude, after a first reading for the norms.

    Args:
        adapter: The adapter.
        weights: The base model.
        module: Path of the embedding.
        blocks: W.
    """
    scale = np.float32(scaling(adapter.config, tuned_name(module, weights.family)))

    def run() -> Iterator[Block]:
        a, b, magnitude = _arrays(adapter, module, _LOOKUP)
        assert a is not None and b is not None

        columns = np.ascontiguousarray(b.T)

        def added() -> Iterator[Block]:
            first = 0
            for block in blocks():
                last = first + len(block)
                delta = product(np.ascontiguousarray(a[:, first:last].T), columns)
                delta *= scale
                delta += block
                yield delta
                first = last

        if magnitude is None:
            yield from added()
            return
        squares = np.zeros(b.shape[0], np.float64)
        for block in added():
            squares += np.einsum("ij,ij->j", block, block)
        factor = (magnitude / np.sqrt(squares)).astype(np.float32)
        for block in added():
            yield block * factor

    return run


def with_rows(adapter: Adapter, module: str, ids: list[int], blocks: Blocks) -> Blocks:
    """The table with some tokens' rows replaced.

    Args:
        adapter: The adapter.
        module: Path of the table.
        ids: The tokens.
        blocks: The table.
    """

    def run() -> Iterator[Block]:
        [rows] = _arrays(adapter, module, ("trainable_tokens_delta",))
        assert rows is not None
        places = np.asarray(ids)
        first = 0
        for block in blocks():
            inside = (places >= first) & (places < first + len(block))
            if inside.any():
                block = block.copy()
                block[places[inside] - first] = rows[inside]
            yield block
            first += len(block)

    return run
