"""An adapter's changes to a model's tensors: the new values of each changed tensor, as blocks in float32.

LoRA (arXiv 2106.09685), rsLoRA, DoRA (arXiv 2402.09353), fully trained modules, separately trained rows of tokens,
grown vocabularies. An adapter that treats tied embedding and head differently unties them, as
PEFT's forward pass does.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from convert.adapter_config import CONFIG, rank_and_alpha, saves_whole, scaling, targets, targets_parameter
from convert.adapters import WEIGHTS, Adapter
from convert.blocks import Block, Blocks, array_blocks
from convert.derived import Values
from convert.errors import ConvertError
from convert.expert_adapters import expert_module, expert_shapes
from convert.formats import FORMATS
from convert.formats.nf4_format import through_nf4
from convert.model.paths import EMBEDDING, HEAD, TABLES, WeightPath
from convert.model.spec import QUANTIZED, WeightSpec
from convert.vocabulary import head_follows, table_rows, token_ids
from convert.weights import Weights

_TILE, _SMALL = 16, 2**18  # rows, and multiplications, of a product that OpenBLAS runs in one thread
_LINEAR = ("lora_A", "lora_B", "lora_magnitude_vector")
_LOOKUP = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


@dataclass(frozen=True)
class Change:
    """A merged weight.

    Attributes:
        name: The weight's name in the checkpoint.
        shape: Its shape, including the rows of a grown vocabulary.
        dtype: The base's dtype.
        values: The new values; of a mixture's weight those of an expert.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    values: Values


@dataclass(frozen=True)
class Changes:
    """All changes of an adapter.

    Attributes:
        tensors: Tree path -> change; for tied tables the shared one alone.
        untied: Whether a tied head becomes separate.
        vocabulary: Rows of the tables.
    """

    tensors: Mapping[str, Change]
    untied: bool
    vocabulary: int


def changes(weights: Weights, adapter: Adapter, *, base_in_nf4: bool = False) -> Changes:
    """Match an adapter with a model; only small arrays are read.

    Args:
        weights: The base model.
        adapter: The adapter.
        base_in_nf4: Whether the adapter was trained over (nested) NF4 matrices that the folder holds in 16 bits.

    Raises:
        ConvertError: The adapter does not fit the model: modules, ranks, sizes or rows (all listed).
    """
    tied = f"{HEAD}.weight" not in weights.specs
    tables = _Tables(weights, adapter, tied)
    problems = tables.problems + _misfits(weights, adapter, tables)
    if problems:
        listed = "; ".join(problems[:12]) + (f"; and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise ConvertError(f"{adapter.folder / WEIGHTS}: does not fit {weights.checkpoint.folder}: {listed}")
    found: dict[str, Change] = {}
    expert_deltas = _ExpertDeltas(weights, adapter)
    for row in weights.specs.values():
        path, module = row.path, row.path.module
        if row.kind == "table":
            continue
        dtype = weights.decoded_dtype(path)
        in_nf4 = base_in_nf4 and row.kind in QUANTIZED and FORMATS[weights.format(path)].target != "nf4"
        base = _through_nf4(weights) if in_nf4 else weights.blocks
        whole = path.with_leaf(f"modules_to_save.{path.leaf}")
        if whole in adapter.tensors:
            found[path] = Change(row.name, row.shape, dtype, _only(_of_adapter(adapter, whole)))
        elif row.kind == "experts" and (lora := expert_deltas.of(path)) is not None:
            found[path] = Change(row.name, row.shape, dtype, _with_expert_lora(lora, row, base))
        elif path.leaf == "weight" and path.with_leaf("lora_A") in adapter.tensors:
            blocks = _with_lora(adapter, weights, module, base(path, None))
            found[path] = Change(row.name, row.shape, dtype, _only(blocks))
        elif in_nf4:
            found[path] = Change(row.name, row.shape, dtype, base)
    return Changes(found | tables.changed(), tables.untied, tables.rows)


class _ExpertDeltas:
    """The arrays of adapters on experts, read once for all experts."""

    def __init__(self, weights: Weights, adapter: Adapter):
        self.weights, self.adapter = weights, adapter
        self.read = functools.lru_cache(4)(self._read)  # gate and up of one layer, in two threads

    def of(self, path: WeightPath) -> "Callable[[int], tuple[np.ndarray, np.ndarray]] | None":
        """Number of an expert -> A and s · B of a projection; None without an adapter."""
        module, rows = expert_module(self.weights.specs, path)
        if module not in self.adapter.layouts:
            return None
        scale = np.float32(scaling(self.adapter.config, self.weights.family.module_name(module)))

        def factors(expert: int) -> tuple[np.ndarray, np.ndarray]:
            a, b = self.read(module)
            return a[expert], b[expert][rows] * scale

        return factors

    def _read(self, module: WeightPath) -> list[np.ndarray]:
        return [array for array in _arrays(self.adapter, module, _LINEAR[:2]) if array is not None]


def _with_expert_lora(
    factors: Callable[[int], tuple[np.ndarray, np.ndarray]], spec: WeightSpec, base: Values
) -> Values:
    """W + s · B · A of each expert."""

    def values(path: str, expert: int | None) -> Blocks:
        def run() -> Iterator[Block]:
            for number in range(spec.shape[0]) if expert is None else (expert,):
                a, b = factors(number)
                first = 0
                for block in base(path, number)():
                    yield product(b[first : first + len(block)], a) + block
                    first += len(block)

        return run

    return values


def _only(blocks: Blocks) -> Values:
    """The values of a weight without experts."""
    return lambda path, expert: blocks


def _through_nf4(weights: Weights) -> Values:
    """The base's values after quantisation to NF4, each expert's by itself."""

    def values(path: str, expert: int | None) -> Blocks:
        spec, dtype = weights.specs[path], weights.decoded_dtype(path)
        shape = spec.shape if expert is None else spec.shape[1:]
        return through_nf4(weights.checkpoint.folder, spec.name, weights.blocks(path, expert), shape, dtype)

    return values


class _Tables:
    """Embedding and head: their changes, tying and number of rows."""

    def __init__(self, weights: Weights, adapter: Adapter, tied: bool):
        self.weights, self.adapter, self.tied = weights, adapter, tied
        self.problems: list[str] = []
        self.base_rows = weights.specs[f"{EMBEDDING}.weight"].shape[0]
        self.width = weights.specs[f"{EMBEDDING}.weight"].shape[1]
        self.tokens = self._tokens()
        changed = {module for module in TABLES if self._changes(module)}
        by_rows = {kind for module in changed for kind in self._changes(module)} == {"trainable_tokens_delta"}
        follows = by_rows and EMBEDDING in changed and head_follows(self.tokens)
        self.untied = tied and bool(changed) and not adapter.config.ensure_weight_tying and not follows
        self.rows = self._rows()

    def changed(self) -> dict[str, Change]:
        """The changed tables."""
        if self.tied and not self.untied:  # one table: changes of the head alone apply to both
            module = EMBEDDING if self._changes(EMBEDDING) else HEAD
            return self._change(EMBEDDING, module) if self._changes(module) or self._grows() else {}
        return {
            path: change
            for module in TABLES
            if self._changes(module) or self._grows() or (self.untied and module == HEAD)
            for path, change in self._change(module, module).items()
        }

    def _change(self, place: str, module: str) -> dict[str, Change]:
        weights, adapter = self.weights, self.adapter
        home = EMBEDDING if self.tied else place
        source = f"{home}.weight"
        blocks = self._grown(module, weights.blocks(source))
        kinds = self._changes(module)
        if "modules_to_save.weight" in kinds:
            blocks = _of_adapter(adapter, f"{module}.modules_to_save.weight")
        if "lora_A" in kinds:
            blocks = _with_lora(adapter, weights, module, blocks)
        if "lora_embedding_A" in kinds:
            blocks = _with_lookup_lora(adapter, weights, module, blocks)
        if "trainable_tokens_delta" in kinds:
            blocks = _with_rows(adapter, module, self.tokens[module], blocks)
        name = next(row.name for row in weights.family.table if row.path.module == place)
        return {f"{place}.weight": Change(name, (self.rows, self.width), weights.decoded_dtype(source), _only(blocks))}

    def _changes(self, module: str) -> set[str]:
        kinds = ("modules_to_save.weight", "lora_A", "lora_embedding_A", "trainable_tokens_delta")
        return {kind for kind in kinds if f"{module}.{kind}" in self.adapter.tensors}

    def _grows(self) -> bool:
        return self.rows > self.base_rows

    def _tokens(self) -> dict[str, list[int]]:
        """Table -> ids of its trained rows."""
        named = token_ids(self.adapter.config)
        if self.tied and EMBEDDING in named and f"{HEAD}.trainable_tokens_delta" in self.adapter.tensors:
            named.setdefault(HEAD, named[EMBEDDING])  # PEFT writes a copy for a grown vocabulary
        self.problems += [f"trainable_token_indices: rows of {name}" for name in named if name not in TABLES]
        return named

    def _rows(self) -> int:
        shapes = {path: info.shape for path, info in self.adapter.tensors.items()}
        return max(self.base_rows, table_rows(shapes, self.tokens.values()))

    def _grown(self, module: str, blocks: Blocks) -> Blocks:
        """The base's rows, then the adapter folder's further rows; rows of trained tokens may be missing."""
        if not self._grows() or f"{module}.modules_to_save.weight" in self.adapter.tensors:
            return blocks
        info = self.adapter.tensors.get(f"{module}.base_layer.weight")
        if info is None and self.tied:
            info = next((self.adapter.tensors.get(f"{table}.base_layer.weight") for table in TABLES), None)
        count, width = self.rows - self.base_rows, self.width

        def run() -> Iterator[Block]:
            yield from blocks()
            if info is None:
                yield np.zeros((count, width), np.float32)
            else:
                yield from array_blocks(module, info, self.base_rows)

        if info is None:
            trained = set(self.tokens.get(module) or (self.tokens.get(EMBEDDING, []) if self.tied else []))
            without = [index for index in range(self.base_rows, self.rows) if index not in trained]
            if without:
                raise ConvertError(
                    f"{self.adapter.folder / WEIGHTS}: {module}: expected values for the rows {without[:8]}, which "
                    f"{self.weights.checkpoint.folder} does not have, got none"
                )
        return run


def _misfits(weights: Weights, adapter: Adapter, tables: _Tables) -> list[str]:
    """Mismatches of adapter and model: unknown or missing arrays, and other sizes."""
    modules = {row.path.module: row.shape for row in weights.specs.values() if row.kind != "bias"}
    tables_shape = (tables.rows, tables.width)
    modules |= {WeightPath(None, "", table, ""): tables_shape for table in TABLES}
    problems = []
    for name, info in adapter.tensors.items():
        path = WeightPath.parse(name)
        if path.module in adapter.layouts:  # fits, or is refused when the adapter is opened
            continue
        module, leaf, shape = path.module, path.leaf, modules.get(path.module)
        bias = weights.specs.get(path.with_leaf("bias"))
        if leaf == "modules_to_save.bias" and bias is not None:
            wanted = bias.shape
        elif shape is None or leaf == "modules_to_save.bias":
            problems.append(f"{path}: the model has no such tensor")
            continue
        else:
            rank = rank_and_alpha(adapter.config, weights.family.module_name(module))[0]
            rows, columns = (shape[0], shape[-1])
            wanted = {
                "lora_A": (rank, columns),
                "lora_B": (rows, rank),
                "lora_embedding_A": (rank, rows),
                "lora_embedding_B": (columns, rank),
                "lora_magnitude_vector": (columns if path.with_leaf("lora_embedding_A") in adapter.tensors else rows,),
                "trainable_tokens_delta": (len(tables.tokens.get(module, ())), columns),
            }.get(leaf, shape)
            if leaf.startswith("lora_") and len(shape) != 2:
                problems.append(f"{path}: the model's {module} is no matrix")
                continue
        small = leaf == "base_layer.weight" and info.shape[1:] == wanted[1:] and info.shape[0] >= tables.base_rows
        if info.shape != wanted and not small:
            problems.append(f"{path}: expected {list(wanted)}, got {list(info.shape)}")
    for module in expert_shapes(weights.specs.values()):
        name = weights.family.module_name(module)
        if module not in adapter.layouts and targets_parameter(adapter.config, name):
            problems.append(f"{name}: a target of {CONFIG} without arrays")
    for module, shape in modules.items():
        name = weights.family.module_name(module)
        if len(shape) == 2 and targets(adapter.config, name, family=weights.family):
            found = any(f"{module}.{kind}" in adapter.tensors for kind in ("lora_A", "lora_embedding_A"))
            twin = adapter.config.ensure_weight_tying and tables.tied and module in TABLES
            if not found and not twin:
                problems.append(f"{name}: a target of {CONFIG} without arrays")
        elif saves_whole(adapter.config, name) and f"{module}.modules_to_save.weight" not in adapter.tensors:
            if not (adapter.config.ensure_weight_tying and module in TABLES):
                problems.append(f"{name}: in modules_to_save of {CONFIG} without arrays")
    return problems


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


def _of_adapter(adapter: Adapter, path: str) -> Blocks:
    return lambda: array_blocks(path, adapter.tensors[path])


def _arrays(adapter: Adapter, module: str, kinds: tuple[str, ...]) -> list[np.ndarray | None]:
    """A module's small arrays in float32; None for missing ones."""
    paths = [WeightPath.parse(module).with_leaf(kind) for kind in kinds]
    return [adapter.read(path).astype(np.float32, copy=False) if path in adapter.tensors else None for path in paths]


def _with_lora(adapter: Adapter, weights: Weights, module: str, blocks: Blocks) -> Blocks:
    """W + s·B·A, row by row; with DoRA each row rescaled to its magnitude."""
    scale = np.float32(scaling(adapter.config, weights.family.module_name(module)))

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


def _with_lookup_lora(adapter: Adapter, weights: Weights, module: str, blocks: Blocks) -> Blocks:
    """W + s·(B·A)ᵀ; with DoRA each column rescaled to its magnitude, after a first reading for the norms."""
    scale = np.float32(scaling(adapter.config, weights.family.module_name(module)))

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


def _with_rows(adapter: Adapter, module: str, ids: list[int], blocks: Blocks) -> Blocks:
    """The table with some tokens' rows replaced."""

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
