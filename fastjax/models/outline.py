"""A model's outline: config.json, tokenizer, headers of the weights and the settings; no tensor is read, no JAX.

Loading, runs and previews begin with it, so that none accepts settings that another refuses. The folder is opened here
alone; the open weights go along to their reader.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.checkpoint import CONFIG, open_checkpoint
from convert.families.mapping import read_config
from convert.files import read_json
from convert.model.config import ModelConfig
from convert.weights import Weights, match_weights
from fastjax.data.new_tokens import add_tokens, vocabulary_size
from fastjax.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from fastjax.errors import ConfigError
from fastjax.models.module_names import module_paths
from fastjax.models.rope_override import with_rope_scaling
from fastjax.models.vocabulary import check_vocabulary, with_vocab_size

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class Outline:
    """A model before its tensors are read.

    Attributes:
        hf_config: the folder's config.json, with the settings' rotary scaling and the rows of new tokens.
        config: the same, parsed.
        tokenizer: the folder's, with the new tokens; None: it has none, and none was wanted.
        new_token_ids: ids of the new tokens.
        known_tokens: rows of the folder's tables with a token.
        max_seq_length: longest row.
        weights: the open weights; None: absent from this machine.
    """

    hf_config: Mapping[str, Any]
    config: ModelConfig
    tokenizer: "PreTrainedTokenizerFast | None"
    new_token_ids: tuple[int, ...]
    known_tokens: int
    max_seq_length: int
    weights: Weights | None


def read_outline(
    folder: Path,
    *,
    max_seq_length: int | None = None,
    float32_modules: Sequence[str] | None = None,
    new_tokens: "Sequence[str | AddedToken] | None" = None,
    rope_scaling: Mapping[str, Any] | None = None,
    weights: bool = True,
    tokenizer: bool = True,
) -> Outline:
    """Open a Hugging Face folder; the arguments are those of `FastLanguageModel.from_pretrained`.

    Args:
        folder: the folder.
        max_seq_length: None: 2048, or the model's limit if that is less.
        float32_modules: names of modules, all present.
        new_tokens: tokens to add.
        rope_scaling: replaces the scaling of the rotary positions.
        weights: open the weight files too; they must exist.
        tokenizer: the folder must have a tokenizer, as it must for new tokens.

    Raises:
        ConfigError: arguments that contradict the model, or no fitting tokenizer.
        ConvertError: a broken folder; the message says how.
    """
    checkpoint = open_checkpoint(folder) if weights else None
    hf_config: Mapping[str, Any] = read_json(folder / CONFIG) if checkpoint is None else checkpoint.config
    config = read_config(hf_config, where=str(folder / CONFIG))
    if rope_scaling is not None:
        hf_config = with_rope_scaling(hf_config, rope_scaling)
        config = read_config(hf_config)
    length = row_length(max_seq_length, config)
    module_paths(float32_modules or (), config)
    loaded, known, new_ids = None, config.vocab_size, []
    if tokenizer or new_tokens or any((folder / name).is_file() for name in TOKENIZER_FILES):
        loaded = load_tokenizer(folder)
        known = min(vocabulary_size(loaded), config.vocab_size)
        new_ids = add_tokens(loaded, new_tokens, config.vocab_size) if new_tokens else []
        if new_ids:
            rows = max(config.vocab_size, vocabulary_size(loaded))
            config, hf_config = dataclasses.replace(config, vocab_size=rows), with_vocab_size(hf_config, rows)
        else:
            check_vocabulary(loaded, config, folder)
    opened = None if checkpoint is None else match_weights(checkpoint)
    return Outline(hf_config, config, loaded, tuple(new_ids), known, length, opened)


def row_length(max_seq_length: int | None, config: ModelConfig) -> int:
    """The length of the longest row, in tokens.

    Args:
        max_seq_length: the setting; None: 2048, or the model's limit if that is less.
        config: the model's.

    Raises:
        ConfigError: beyond the model's limit.
    """
    if max_seq_length is None:
        return min(2048, config.max_length)
    if max_seq_length > config.max_length:
        pretrained = config.rope.original_max_position_embeddings or config.max_length / config.rope.factor
        raise ConfigError(
            f"max_seq_length: expected at most the model's {config.max_length} positions, got {max_seq_length}; take "
            "a smaller one, or stretch the positions: rope_scaling: {rope_type: yarn, factor: "
            f"{math.ceil(max_seq_length / pretrained):.1f}}}"
        )
    return max_seq_length
