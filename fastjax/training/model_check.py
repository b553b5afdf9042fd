"""A run's model and adapter as far as config.json, tokenizer, headers and settings say: before data or weights.

A run and its preview begin with this, so that a preview refuses what the run would. Nothing here imports JAX.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from convert.adapters import CONFIG, config_from_json, open_adapter
from convert.families import family_for
from convert.files import read_json
from convert.weights import open_weights
from fastjax.data.new_tokens import own_tokenizer, vocabulary_size
from fastjax.errors import ConfigError
from fastjax.lora.settings import check_adapter, fresh_adapter
from fastjax.lora.tables import adapter_rows
from fastjax.models.outline import Outline, read_outline
from fastjax.training.config import LoraSection, TrainConfig
from fastjax.training.origins import located

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_run_tokenizer(config: TrainConfig) -> "PreTrainedTokenizerFast":
    """The tokenizer of a run: the model's with the tokens that the run adds, or the adapter's own unless it has fewer.

    Args:
        config: the settings.

    Raises:
        ConfigError: a model or adapter that is not to be found, without a tokenizer that can be loaded, or that does
            not suit the settings.
        ConvertError: what is wrong with their folders. Of a name on the hub the files of weights are not asked for.
    """
    source, model = located(config, "model.model_name", weights=False), config.model
    with _within("model", model):
        outline = read_outline(
            source.folder,
            max_seq_length=model.max_seq_length,
            float32_modules=model.float32_modules,
            new_tokens=model.new_tokens,
            rope_scaling=model.rope_scaling,
            weights=source.name is None,
        )
    if source.name is None:
        open_weights(source.folder)
    if config.lora.adapter is not None:
        return _with_adapter(config, outline)
    if not model.full_finetuning:
        settings = lora_arguments(config.lora)
        del settings["random_state"]
        with _within("lora", config.lora):
            fresh_adapter(outline.config, outline.new_token_ids, **settings)
    return outline.tokenizer


def lora_arguments(lora: LoraSection) -> dict[str, Any]:
    """The section `lora` as the arguments of `FastLanguageModel.get_peft_model`.

    Args:
        lora: without an adapter to start from.
    """
    arguments = dataclasses.asdict(lora)
    del arguments["adapter"]
    if arguments["lora_dropout"] is None:
        del arguments["lora_dropout"]
    return arguments


def _with_adapter(config: TrainConfig, outline: Outline) -> "PreTrainedTokenizerFast":
    """The tokenizer of a run that starts from an adapter, whose settings fit the model."""
    source = located(config, "lora.adapter", weights=False)
    folder, tokenizer = source.folder, own_tokenizer(source.folder)
    if source.name is None:
        opened = open_adapter(folder, family=family_for(outline.hf_config))
        adapter, shapes = opened.config, {path: info.shape for path, info in opened.tensors.items()}
    else:
        adapter, shapes = config_from_json(read_json(folder / CONFIG), folder / CONFIG), {}
    rows = max(outline.config.vocab_size, adapter_rows(adapter, shapes, tokenizer))
    check_adapter(adapter, dataclasses.replace(outline.config, vocab_size=rows), outline.new_token_ids, folder)
    if tokenizer is not None and vocabulary_size(tokenizer) >= vocabulary_size(outline.tokenizer):
        return tokenizer
    return outline.tokenizer


@contextlib.contextmanager
def _within(name: str, section: object) -> Iterator[None]:
    """Name the section in an error that begins with one of its keys."""
    try:
        yield
    except ConfigError as error:
        if str(error).partition(":")[0] not in vars(section):
            raise
        raise ConfigError(f"{name}.{error}") from error
