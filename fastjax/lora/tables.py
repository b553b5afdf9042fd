"""Embedding and head under an adapter: which of the two is trained, whole or by rows, and with one array or two.

A reward model's head is its score, which is trained whole.

The rule for tied, grown and trained tables: every table has at most one kind of training (`modules_to_save`, trained
rows, a low-rank adapter); the rows of new tokens are always trained; tied tables share one array where both are trained
alike. No JAX. `lora.attach` makes the arrays, `models.new_rows` grows the tables.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from convert.adapters import AdapterConfig, targets
from convert.errors import shown
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD, SCORE, TABLES, WeightPath
from convert.vocabulary import head_follows, table_rows, token_ids
from fastjax.data.tokenizer import vocabulary_size
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainedTable(NamedTuple):
    """One trained array, of a whole table or of some of its rows.

    Attributes:
        uses: "embed_tokens", "lm_head" or both, where one array is for tied tables.
        ids: tokens of the rows, in their order; None: all.
    """

    uses: tuple[str, ...]
    ids: tuple[int, ...] | None

    @property
    def paths(self) -> list[WeightPath]:
        """The paths of its array in an adapter, one a use."""
        leaf = "modules_to_save.weight" if self.ids is None else "trainable_tokens_delta"
        return [WeightPath(None, "", name, leaf) for name in self.uses]

    def stored(self, paths: Container[str]) -> WeightPath:
        """The path, among an adapter's, of the array that is taken: of tied whole tables either may be there."""
        return next((path for path in self.paths if self.ids is None and path in paths), self.paths[0])


def savable(config: ModelConfig) -> tuple[str, ...]:
    """The modules that an adapter can train whole: embedding and head, which is a reward model's score."""
    return (EMBEDDING, SCORE) if config.scored else TABLES


def saved_modules(adapter: AdapterConfig) -> tuple[str, ...]:
    """The modules that are trained whole, by their path in the model."""
    return tuple(dict.fromkeys(name.removeprefix("model.") for name in adapter.modules_to_save or ()))


def check_saved(adapter: AdapterConfig, known: Sequence[str]) -> None:
    """Refuse modules that cannot be trained whole.

    Args:
        adapter: PEFT's settings.
        known: those that can.

    Raises:
        ConfigError: names in `modules_to_save` besides these.
    """
    if unknown := [name for name in saved_modules(adapter) if name not in known]:
        raise ConfigError(
            f"modules_to_save: expected some of {list(known)}, which alone are trained whole here, got "
            f"{shown(unknown)}; an adapter of PEFT's with others can be merged (fastjax convert merge)"
        )


def shares_whole_table(adapter: AdapterConfig, config: ModelConfig) -> bool:
    """Whether one whole trained table is for embedding and head.

    Args:
        adapter: PEFT's settings.
        config: the model's.
    """
    return adapter.ensure_weight_tying and config.tie_word_embeddings and bool(saved_modules(adapter))


def trained_tables(adapter: AdapterConfig, config: ModelConfig) -> list[TrainedTable]:
    """The trained arrays of embedding and head; low-rank adapters are sites (`lora.sites`).

    Args:
        adapter: PEFT's settings.
        config: the model's.

    Raises:
        ConfigError: an id that is no row, a table with two kinds of training, or a combination that PEFT lacks too.
    """
    saved = saved_modules(adapter)
    whole = [TABLES] if shares_whole_table(adapter, config) else [(name,) for name in saved]
    tables = [TrainedTable(uses, None) for uses in whole]
    rows = _rows(adapter)
    for table, ids in rows.items():
        _check_rows(table, ids, adapter, config)
    if config.tie_word_embeddings and EMBEDDING in rows:
        if head_follows(rows):
            return [*tables, TrainedTable(TABLES, rows[EMBEDDING])]
        if adapter.ensure_weight_tying:
            raise ConfigError(
                "trainable_token_indices: ensure_weight_tying needs equal ids for embed_tokens and lm_head"
            )
    return tables + [TrainedTable((table,), ids) for table, ids in rows.items()]


def with_new_rows(adapter: AdapterConfig, config: ModelConfig, new: Sequence[int]) -> AdapterConfig:
    """Settings that train the rows of the new tokens, in the embedding and in the head.

    Args:
        adapter: PEFT's settings.
        config: the model's, with the new tokens.
        new: their ids.

    Raises:
        ConfigError: modules_to_save unties a head beside trained rows of the embedding, or a table has an adapter.
    """
    if not new:
        return adapter
    saved = set(saved_modules(adapter)) & set(TABLES)
    tied = config.tie_word_embeddings
    if tied and saved == {HEAD} and not adapter.ensure_weight_tying:
        raise ConfigError(
            "modules_to_save: lm_head alone unties the embeddings, and PEFT cannot train rows of these beside it: name "
            "embed_tokens too, or set ensure_weight_tying: true"
        )
    if saved == set(TABLES) or (saved and shares_whole_table(adapter, config)):
        return adapter
    rows = {table: [*ids] for table, ids in _rows(adapter).items()}
    tables = [name for name in savable(config) if name in TABLES and name not in saved]
    if targeted := [name for name in tables if _is_target(adapter, name)]:
        raise ConfigError(
            f"target_modules: {targeted} cannot have an adapter beside the rows of new tokens, which are trained "
            "themselves; name them in modules_to_save instead, or leave them out"
        )
    if tied and not saved and HEAD not in rows:
        tables = [EMBEDDING]  # the head follows
    for table in tables:
        before = rows.setdefault(table, [])
        before += [index for index in new if index not in before]
    indices = rows[EMBEDDING] if list(rows) == [EMBEDDING] else rows
    return dataclasses.replace(adapter, trainable_token_indices=indices or None)


def adapter_rows(
    adapter: AdapterConfig, shapes: Mapping[str, Sequence[int]], tokenizer: "PreTrainedTokenizerBase | None"
) -> int:
    """The number of rows that an adapter's tables had in training; 0 for an adapter that does not tell.

    Args:
        adapter: PEFT's settings.
        shapes: path -> shape of its arrays.
        tokenizer: its own; without a table among the arrays, tokenizer and token ids decide.
    """
    known = 0 if tokenizer is None else vocabulary_size(tokenizer)
    return table_rows(shapes, ()) or max(known, table_rows({}, _rows(adapter).values()))


def _rows(adapter: AdapterConfig) -> dict[str, tuple[int, ...]]:
    return {table: tuple(ids) for table, ids in token_ids(adapter).items() if ids}


def _is_target(adapter: AdapterConfig, table: str) -> bool:
    return targets(adapter, table if table == HEAD else f"model.{table}")


def _check_rows(table: str, ids: Sequence[int], adapter: AdapterConfig, config: ModelConfig) -> None:
    where = "trainable_token_indices"
    known = [name for name in savable(config) if name in TABLES]
    if table not in known:
        raise ConfigError(f"{where}: expected rows of {' or '.join(known)}, got rows of {table}")
    wrong = [index for index in ids if not 0 <= index < config.vocab_size]
    if wrong or len(set(ids)) < len(ids):
        raise ConfigError(
            f"{where}: expected different ids from 0 to {config.vocab_size - 1}, got {wrong or list(ids)}"
        )
    saved = set(saved_modules(adapter))
    together = saved & (set(TABLES) if adapter.ensure_weight_tying or table == EMBEDDING else {table})
    if table in saved or _is_target(adapter, table) or (config.tie_word_embeddings and together):
        raise ConfigError(
            f"{where}: {table} is trained already, by modules_to_save or target_modules (with a head that is tied "
            "to it); leave one of the two out"
        )
