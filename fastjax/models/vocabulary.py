"""New tokens: embedding and head grow by their rows, and an adapter trains these rows.

A table grows only where its rows do not suffice: many checkpoints have more rows than their tokenizer has tokens. An
adapter holds the rows of all new tokens, so that it does not matter how another program starts them. Nothing here
imports JAX; `models.new_rows` grows the tables.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.adapters import AdapterConfig, targets
from convert.families import family_for
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD, TABLES, WeightPath
from fastjax.data.new_tokens import vocabulary_size
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_AXES = {"modules_to_save.weight": 0, "base_layer.weight": 0, "lora_embedding_A": 1}
#: Table -> array of an adapter -> its axis of tokens.
_ROWS = {EMBEDDING: _AXES, HEAD: {**_AXES, "lora_B": 0}}


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", config: ModelConfig, where: str | Path) -> None:
    """Refuse a tokenizer with tokens that have no embedding.

    Args:
        tokenizer: the model's.
        config: the model's.
        where: the tokenizer's folder.

    Raises:
        ConfigError: names both sizes.
    """
    size = vocabulary_size(tokenizer)
    if size > config.vocab_size:
        names = {number: text for text, number in tokenizer.get_vocab().items()}
        without = [names[number] for number in range(config.vocab_size, size) if number in names]
        raise ConfigError(
            f"{where}: the tokenizer has ids up to {size - 1}, but the embedding has {config.vocab_size} rows: no row "
            f"for {', '.join(repr(text) for text in without[:8])}{' and more' * (len(without) > 8)}; name these in "
            "model.new_tokens to give them rows, or use the tokenizer that belongs to the model"
        )


def with_vocab_size(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """A config.json with another number of rows in its tables."""
    section = family_for(config).section
    if section is None:
        return {**config, "vocab_size": rows}
    return {**config, section: {**config[section], "vocab_size": rows}}


def trained_rows(adapter: AdapterConfig, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Which rows an adapter trains: table -> ids, with "tied" for one set of rows in both uses of tied embeddings.

    Args:
        adapter: PEFT's settings; a list of ids is about the embedding, and with tied embeddings the head follows it.
        config: the model's.

    Raises:
        ConfigError: an id that is no row, a table that is trained otherwise too, or what PEFT cannot do either.
    """
    given = _by_table(adapter)
    saved = {name.removeprefix("model.") for name in adapter.modules_to_save or ()}
    for table, ids in given.items():
        where = "trainable_token_indices"
        if table not in TABLES:
            raise ConfigError(f"{where}: expected rows of {' or '.join(TABLES)}, given rows of {table}")
        wrong = [index for index in ids if not 0 <= index < config.vocab_size]
        if wrong or len(set(ids)) < len(ids):
            raise ConfigError(
                f"{where}: expected different ids from 0 to {config.vocab_size - 1}, given {wrong or list(ids)}"
            )
        name = table if table == "lm_head" else f"model.{table}"
        whole = saved & set(TABLES) if adapter.ensure_weight_tying or table == "embed_tokens" else saved & {table}
        if table in saved or targets(adapter, name) or (config.tie_word_embeddings and whole):
            raise ConfigError(
                f"{where}: {table} is trained already, by modules_to_save or target_modules (with a head that is tied "
                "to it); leave one of the two out"
            )
    if config.tie_word_embeddings and "embed_tokens" in given:
        embedding = given["embed_tokens"]
        if given.get("lm_head", embedding) == embedding:
            return {"tied": embedding}
        if adapter.ensure_weight_tying:
            raise ConfigError(
                "trainable_token_indices: ensure_weight_tying needs equal ids for embed_tokens and lm_head"
            )
    return given


def training_new_tokens(adapter: AdapterConfig, config: ModelConfig, new: Sequence[int]) -> AdapterConfig:
    """Settings that train the rows of the new tokens, in the embedding and in the head.

    Args:
        adapter: PEFT's settings.
        config: the model's, with the new tokens.
        new: their ids.

    Raises:
        ConfigError: modules_to_save unties a head whose embeddings would be trained by rows, or a table has an adapter.
    """
    if not new:
        return adapter
    saved = {name.removeprefix("model.") for name in adapter.modules_to_save or ()} & set(TABLES)
    tied = config.tie_word_embeddings
    if tied and saved == {"lm_head"} and not adapter.ensure_weight_tying:
        raise ConfigError(
            "modules_to_save: lm_head alone unties the embeddings, and PEFT cannot train rows of these beside it: name "
            "embed_tokens too, or set ensure_weight_tying: true"
        )
    if saved == set(TABLES) or (tied and saved and adapter.ensure_weight_tying):
        return adapter
    given = _by_table(adapter)
    tables = [name for name in TABLES if name not in saved]
    adapted = [name for name in tables if targets(adapter, name if name == "lm_head" else f"model.{name}")]
    if adapted:
        raise ConfigError(
            f"target_modules: {adapted} cannot have an adapter beside the rows of new tokens, which are trained "
            "themselves; name them in modules_to_save instead, or leave them out"
        )
    if tied and not saved and "lm_head" not in given:
        tables = ["embed_tokens"]  # the head follows
    rows = {table: [*ids] for table, ids in given.items()}
    for table in tables:
        before = rows.setdefault(table, [])
        before += [index for index in new if index not in before]
    indices = rows["embed_tokens"] if list(rows) == ["embed_tokens"] else rows
    return dataclasses.replace(adapter, trainable_token_indices=indices or None)


def adapter_rows(
    adapter: AdapterConfig, shapes: Mapping[str, Sequence[int]], tokenizer: "PreTrainedTokenizerBase | None"
) -> int:
    """How many rows the tables had that an adapter was trained with, as far as it says; 0 where it says nothing.

    Args:
        adapter: PEFT's settings.
        shapes: of its arrays, by path: tables in it say how many rows there were.
        tokenizer: the adapter's own, which says so without any, as do the token indices.
    """
    paths = {WeightPath.parse(name): shape for name, shape in shapes.items()}
    sizes = [
        shape[_ROWS[path.module][path.leaf]] for path, shape in paths.items() if path.leaf in _ROWS.get(path.module, {})
    ]
    if sizes:
        return max(sizes)
    ids = [index for indices in _by_table(adapter).values() for index in indices]
    return max([0 if tokenizer is None else vocabulary_size(tokenizer), *(index + 1 for index in ids)])


def _by_table(adapter: AdapterConfig) -> dict[str, tuple[int, ...]]:
    indices = adapter.trainable_token_indices
    by_table = indices if isinstance(indices, dict) else {"embed_tokens": indices or []}
    return {name.removeprefix("model."): tuple(ids) for name, ids in by_table.items() if ids}
