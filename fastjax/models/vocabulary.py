"""A model's vocabulary against its tokenizer's. No JAX.

A table grows only where its rows do not suffice: many checkpoints have more rows than their tokenizer has tokens.
`models.new_rows` grows the tables, `lora.tables` trains the new rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.families import family_for
from convert.model.config import ModelConfig
from fastjax.data.tokenizer import vocabulary_size
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", config: ModelConfig, where: str | Path) -> None:
    """Refuse a tokenizer with tokens beyond the embedding.

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
