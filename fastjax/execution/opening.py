"""A model's folder opened: config.json, tokenizer, headers of the weights, an adapter's settings. No tensor, no JAX.

Loading, runs and previews begin with it, so that none accepts settings that another refuses. A folder is opened here
alone, once; the open weights and arrays go along to their readers.
"""

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.adapter_config import CONFIG as ADAPTER_CONFIG
from convert.adapter_config import config_from_json
from convert.checkpoint import CONFIG, open_checkpoint
from convert.families.mapping import read_config
from convert.files import read_json
from convert.hub import Source, fetch
from convert.model.config import ModelConfig
from convert.model.spec import QUANTIZED
from convert.trained_over import TrainedOver, held_as
from convert.weights import Weights, match_weights
from fastjax.data.tokenizer import TOKENIZER_FILES, add_tokens, load_tokenizer, set_special_tokens, vocabulary_size
from fastjax.errors import ConfigError
from fastjax.execution.options import LoadOptions
from fastjax.lora.fit import OpenAdapter, open_fitting
from fastjax.models.module_names import frozen_arrays, module_paths
from fastjax.models.rope_override import with_rope_scaling
from fastjax.models.vocabulary import check_vocabulary, with_vocab_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class OpenModel:
    """A model before its tensors are read.

    Attributes:
        source: where its folder comes from.
        hf_config: the folder's config.json, with the options' rotary scaling and the rows of new tokens.
        config: the same, parsed.
        base_tokenizer: the folder's, with the new tokens; None: it has none, and none was wanted.
        new_token_ids: ids of the new tokens.
        known_tokens: rows of the folder's tables with a token.
        max_seq_length: longest row.
        weights: the open weights; None: absent from this machine.
        adapter: to put on it; None: there is none.
    """

    source: Source
    hf_config: Mapping[str, Any]
    config: ModelConfig
    base_tokenizer: "PreTrainedTokenizerFast | None"
    new_token_ids: tuple[int, ...]
    known_tokens: int
    max_seq_length: int
    weights: Weights | None
    adapter: OpenAdapter | None = None

    @property
    def name(self) -> str:
        """The name on the hub, or the folder."""
        return self.source.name or str(self.source.folder)

    def held_as(self, options: LoadOptions, float32_modules: Collection[str] = ()) -> TrainedOver | None:
        """The base as these options hold it, for an adapter's note of it; None: its weights are not here.

        Args:
            options: of loading it.
            float32_modules: paths of the modules in float32.
        """
        if self.weights is None:
            return None
        modules = [spec.path.module for spec in self.weights.specs.values() if spec.kind in QUANTIZED]
        skipped = [module for module in modules if module in float32_modules]
        source = {"name": self.name, "revision": self.source.revision}
        return held_as(self.weights, options.in_nf4, **source, skipped=skipped)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The base's with the new tokens, or the adapter's own unless it has fewer."""
        base, own = self.base_tokenizer, None if self.adapter is None else self.adapter.tokenizer
        assert base is not None, "a folder without one was refused"
        return own if own is not None and vocabulary_size(own) >= vocabulary_size(base) else base


def open_folder(source: Source, options: LoadOptions, *, weights: bool = True, tokenizer: bool = True) -> OpenModel:
    """Open a Hugging Face folder.

    Args:
        source: the folder.
        options: of loading it.
        weights: open the weight files too; they must exist.
        tokenizer: the folder must have a tokenizer, as it must for new tokens.

    Raises:
        ConfigError: options that contradict the model, or no fitting tokenizer.
        ConvertError: a broken folder; the message says how.
    """
    folder, new_tokens = source.folder, options.new_tokens
    checkpoint = open_checkpoint(folder) if weights else None
    hf_config: Mapping[str, Any] = read_json(folder / CONFIG) if checkpoint is None else checkpoint.config
    config = read_config(hf_config, where=str(folder / CONFIG))
    if options.rope_scaling is not None:
        hf_config = with_rope_scaling(hf_config, options.rope_scaling)
        config = read_config(hf_config)
    length = row_length(options, config)
    module_paths(options.float32_modules or (), config)
    frozen_arrays(config, options.unfrozen_parameters)
    loaded, known, new_ids = None, config.vocab_size, []
    if (
        tokenizer
        or new_tokens
        or options.special_tokens_map
        or any((folder / name).is_file() for name in TOKENIZER_FILES)
    ):
        loaded = load_tokenizer(folder)
        known = min(vocabulary_size(loaded), config.vocab_size)
        new_ids = add_tokens(loaded, new_tokens, config.vocab_size) if new_tokens else []
        set_special_tokens(loaded, {**(options.special_tokens_map or {})})
        if new_ids:
            rows = max(config.vocab_size, vocabulary_size(loaded))
            config, hf_config = dataclasses.replace(config, vocab_size=rows), with_vocab_size(hf_config, rows)
        else:
            check_vocabulary(loaded, config, folder)
    opened = None if checkpoint is None else match_weights(checkpoint)
    return OpenModel(source, hf_config, config, loaded, tuple(new_ids), known, length, opened)


def open_pretrained(
    name: str | os.PathLike[str],
    options: LoadOptions,
    *,
    revision: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> OpenModel:
    """Open a model by its name, with an adapter if one is named or if the name is that of an adapter over a base.

    Args:
        name: a folder, or a name on the hub, of a model or of an adapter whose settings name its base.
        options: of loading it.
        revision: of a name on the hub.
        adapter: folder or name on the hub of an adapter for the model; None: there is none beside it.

    Raises:
        ConfigError: options or an adapter that do not fit the model.
        ConvertError: a broken folder; the message says how.
    """
    source = fetch(name, revision)
    folder, file = None if adapter is None else fetch(adapter).folder, source.folder / ADAPTER_CONFIG
    if file.is_file() and not (source.folder / CONFIG).exists():
        if adapter is not None:
            raise ConfigError(f"{adapter}: expected none beside {name}, which is an adapter with a base of its own")
        settings, folder = config_from_json(read_json(file), file), source.folder
        if settings.base_model_name_or_path is None:
            raise ConfigError(
                f"{file}: base_model_name_or_path: expected the base's folder or name, got none; load the base, then "
                "the adapter by FastLanguageModel.load_adapter"
            )
        source = fetch(settings.base_model_name_or_path, settings.revision)
    check_no_run(source.folder, "the folder of a model or an adapter", CONFIG)
    opened = open_folder(source, options)
    if folder is None:
        return opened
    check_no_run(folder, "the folder of an adapter", ADAPTER_CONFIG)
    allow = options.allow_nonfinite
    fitting = open_fitting(folder, opened.config, opened.new_token_ids, allow_nonfinite=allow)
    return dataclasses.replace(opened, adapter=fitting)


def check_no_run(folder: Path, kind: str, file: str) -> None:
    """Refuse the folder of a run, or of another kind of result, for one that is to be loaded.

    Args:
        folder: that was named.
        kind: what it should be, in words.
        file: that such a folder has.

    Raises:
        ConfigError: it is another one; the message names its result.
    """
    if (folder / file).exists() or not folder.is_dir():
        return
    for name, config in (("adapter", ADAPTER_CONFIG), ("model", CONFIG)):
        if (folder / name / config).is_file():
            raise ConfigError(f"{folder}: expected {kind}, got the folder of a run, whose result is {folder / name}")
    if (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: expected {kind}, got a model; FastLanguageModel.from_pretrained loads it")


def row_length(options: LoadOptions, config: ModelConfig) -> int:
    """The length of the longest row, in tokens.

    Args:
        options: whose `max_seq_length` it is; None: 2048, or the model's limit if that is less.
        config: the model's.

    Raises:
        ConfigError: beyond the model's limit.
    """
    length = options.max_seq_length
    if length is None:
        return min(2048, config.max_length)
    if config.index_topk is not None and length > config.index_topk:
        raise ConfigError(
            f"max_seq_length: expected at most the model's index_topk, {config.index_topk}, got {length}; in longer "
            "rows its attention is sparse, which is not supported"
        )
    if length > config.max_length:
        pretrained = config.rope.original_max_position_embeddings or config.max_length / config.rope.factor
        raise ConfigError(
            f"max_seq_length: expected at most the model's {config.max_length} positions, got {length}; take "
            "a smaller one, or stretch the positions: rope_scaling: {rope_type: yarn, factor: "
            f"{math.ceil(length / pretrained):.1f}}}"
        )
    return length
