"""An adapter's changes to a model's weights: which change, and their new values.

The vocabulary may grow. An adapter that treats tied embedding and head differently unties them, as PEFT's forward pass
does.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from convert.adapter_config import CONFIG, SCORED, rank_and_alpha, saves_whole, selects, tuned_name
from convert.adapters import WEIGHTS, Adapter
from convert.blocks import Block, Blocks, array_blocks
from convert.derived import Values
from convert.errors import ConvertError, unexpected
from convert.expert_adapters import expert_shapes
from convert.formats import FORMATS
from convert.formats.nf4_format import through_nf4
from convert.merged_values import ExpertAdapters, of_adapter, with_lookup_lora, with_lora, with_rows
from convert.model.paths import EMBEDDING, HEAD, SCORE, TABLES, WeightPath
from convert.model.spec import QUANTIZED
from convert.vocabulary import head_follows, table_rows, token_ids
from convert.weights import Weights


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
    """All changes of an adapter; by default none.

    Attributes:
        tensors: Tree path -> change; for tied tables the shared one alone.
        untied: Whether a tied head becomes separate.
        vocabulary: Rows of the tables.
        scored: Whether the result is a reward model: the base is one, or its head gives way to a score.
    """

    tensors: Mapping[str, Change] = field(default_factory=dict)
    untied: bool = False
    vocabulary: int = 0
    scored: bool = False


def changes(weights: Weights, adapter: Adapter, *, base_in_nf4: bool = False, kept: Collection[str] = ()) -> Changes:
    """Match an adapter with a model; only small arrays are read.

    Args:
        weights: The base model.
        adapter: The adapter.
        base_in_nf4: Whether the adapter was trained over (nested) NF4 matrices that the folder holds in 16 bits.
        kept: Paths of matrices that were in 16 bits there.

    Raises:
        ConvertError: The adapter does not fit the model: modules, ranks, sizes or rows (all listed).
    """
    scored = _scored(weights, adapter)
    tied = f"{HEAD}.weight" not in weights.specs and not scored
    tables = _Tables(weights, adapter, tied, (EMBEDDING,) if scored else TABLES)
    problems = tables.problems + _misfits(weights, adapter, tables)
    if problems:
        listed = "; ".join(problems[:12]) + (f"; and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise ConvertError(f"{adapter.folder / WEIGHTS}: does not fit {weights.checkpoint.folder}: {listed}")
    changed: dict[str, Change] = {}
    experts = ExpertAdapters(weights, adapter)
    for row in weights.specs.values():
        path, module = row.path, row.path.module
        if row.kind == "table":
            continue
        dtype = weights.decoded_dtype(path)
        in_nf4 = base_in_nf4 and row.kind in QUANTIZED and path not in kept
        in_nf4 = in_nf4 and FORMATS[weights.format(path)].target != "nf4"
        base = _through_nf4(weights) if in_nf4 else weights.blocks
        whole = path.with_leaf(f"modules_to_save.{path.leaf}")
        if whole in adapter.tensors:
            changed[path] = Change(row.name, row.shape, dtype, _only(of_adapter(adapter, whole)))
        elif row.kind == "experts" and (merged := experts.merged(path, base)) is not None:
            changed[path] = Change(row.name, row.shape, dtype, merged)
        elif path.leaf == "weight" and path.with_leaf("lora_A") in adapter.tensors:
            blocks = with_lora(adapter, weights, module, base(path, None))
            changed[path] = Change(row.name, row.shape, dtype, _only(blocks))
        elif in_nf4:
            changed[path] = Change(row.name, row.shape, dtype, base)
    score = WeightPath(None, "", SCORE)
    if scored and score not in weights.specs:
        whole, dtype = score.with_leaf("modules_to_save.weight"), weights.decoded_dtype(f"{EMBEDDING}.weight")
        changed[score] = Change(score, (1, tables.width), dtype, _only(of_adapter(adapter, whole)))
    return Changes(changed | tables.changed(), tables.untied, tables.rows, scored)


def _scored(weights: Weights, adapter: Adapter) -> bool:
    """Whether the merged model is a reward model; an adapter on logits is none for a model without them."""
    wanted, base = adapter.config.task_type == SCORED, f"{SCORE}.weight" in weights.specs
    if base and not wanted:
        raise unexpected(
            adapter.folder / CONFIG, "task_type", f"{SCORED}, as the base has a score", adapter.config.task_type
        )
    if wanted and not base:
        weights.family.scored(weights.checkpoint.config)
        if f"{SCORE}.modules_to_save.weight" not in adapter.tensors:
            saved = adapter.config.modules_to_save
            raise unexpected(adapter.folder / CONFIG, "modules_to_save", f"{SCORE}, as the base has none", saved)
    return wanted


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
    """Embedding and head: their changes, tying and number of rows; a reward model has no head of these."""

    def __init__(self, weights: Weights, adapter: Adapter, tied: bool, names: tuple[str, ...]):
        self.weights, self.adapter, self.tied, self.names = weights, adapter, tied, names
        self.problems: list[str] = []
        self.base_rows = weights.specs[f"{EMBEDDING}.weight"].shape[0]
        self.width = weights.specs[f"{EMBEDDING}.weight"].shape[1]
        self.tokens = self._tokens()
        changed = {module for module in names if self._changes(module)}
        by_rows = {kind for module in changed for kind in self._changes(module)} == {"trainable_tokens_delta"}
        follows = by_rows and EMBEDDING in changed and head_follows(self.tokens)
        self.untied = tied and bool(changed) and not adapter.config.ensure_weight_tying and not follows
        self.rows = self._rows()
        if self._grows() and f"{HEAD}.bias" in weights.specs:
            self.problems.append(f"{self.rows} rows of a table beside a bias of {self.base_rows}, which does not grow")

    def changed(self) -> dict[str, Change]:
        """The changed tables."""
        if self.tied and not self.untied:  # one table: changes of the head alone apply to both
            module = EMBEDDING if self._changes(EMBEDDING) else HEAD
            return self._change(EMBEDDING, module) if self._changes(module) or self._grows() else {}
        return {
            path: change
            for module in self.names
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
            blocks = of_adapter(adapter, f"{module}.modules_to_save.weight")
        if "lora_A" in kinds:
            blocks = with_lora(adapter, weights, module, blocks)
        if "lora_embedding_A" in kinds:
            blocks = with_lookup_lora(adapter, weights, module, blocks)
        if "trainable_tokens_delta" in kinds:
            blocks = with_rows(adapter, module, self.tokens[module], blocks)
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
        self.problems += [f"trainable_token_indices: rows of {name}" for name in named if name not in self.names]
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
    modules = {row.path.module: row.shape for row in weights.specs.values() if row.path.leaf == "weight"}
    tables_shape = (tables.rows, tables.width)
    modules |= {WeightPath(None, "", table, ""): tables_shape for table in tables.names}
    if HEAD not in tables.names:
        modules.pop(WeightPath(None, "", HEAD, ""), None)
        modules[WeightPath(None, "", SCORE, "")] = (1, tables.width)
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
            rank = rank_and_alpha(adapter.config, tuned_name(module, weights.family))[0]
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
        if module not in adapter.layouts and selects(adapter.config, module, weights.family):
            problems.append(f"{name}: a target of {CONFIG} without arrays")
    for module, shape in modules.items():
        name = weights.family.module_name(module)
        if len(shape) == 2 and selects(adapter.config, module, weights.family):
            adapted = any(f"{module}.{kind}" in adapter.tensors for kind in ("lora_A", "lora_embedding_A"))
            twin = adapter.config.ensure_weight_tying and tables.tied and module in TABLES
            if not adapted and not twin:
                problems.append(f"{name}: a target of {CONFIG} without arrays")
        elif saves_whole(adapter.config, name) and f"{module}.modules_to_save.weight" not in adapter.tensors:
            if not (adapter.config.ensure_weight_tying and module in TABLES):
                problems.append(f"{name}: in modules_to_save of {CONFIG} without arrays")
    return problems
