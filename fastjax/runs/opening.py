"""A run's model and adapter, opened: config.json, tokenizer, headers and settings, before data or tensors are read.

A run and its preview begin with this, so a preview refuses what the run would. Each folder is opened here, once: its
fingerprints and its weights come from the open folder. Nothing here imports JAX.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from convert.adapters import CONFIG, Adapter, AdapterConfig, config_from_json
from convert.checkpoint import WEIGHT_FILES
from convert.errors import ConvertError
from convert.families.mapping import with_score
from convert.files import read_json
from convert.hub import Source
from convert.model.config import ModelConfig
from convert.trained_over import base_notes, held_as
from fastjax.data.new_tokens import own_tokenizer, vocabulary_size
from fastjax.errors import ConfigError
from fastjax.lora.fit import open_fitting
from fastjax.lora.settings import check_adapter, fresh_adapter, tables_note
from fastjax.lora.tables import adapter_rows
from fastjax.models.outline import Outline, read_outline
from fastjax.runs.hub_names import located
from fastjax.training.config import LoraSection, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class OpenAdapter(NamedTuple):
    """The adapter to start from.

    Attributes:
        arrays: the open PEFT folder; None: its arrays are not on this machine.
        tokenizer: the folder's own; None: it has none.
    """

    arrays: Adapter | None
    tokenizer: "PreTrainedTokenizerFast | None"


@dataclasses.dataclass(frozen=True)
class OpenShapes:
    """A run's model, of which shapes are wanted.

    Attributes:
        source: origin of the base.
        outline: of the base, with its open weights if they are there.
        adapter: to start from; None: there is none.
    """

    source: Source
    outline: Outline
    adapter: OpenAdapter | None


@dataclasses.dataclass(frozen=True)
class OpenModel(OpenShapes):
    """A run's model, whose folders are open.

    Attributes:
        tokenizer: the base's with the tokens that the run adds, or the adapter's own unless it has fewer.
    """

    tokenizer: "PreTrainedTokenizerFast"


def open_model(config: TrainConfig, *, weights: bool = True) -> OpenModel:
    """Open the model and the adapter of a run.

    Args:
        config: the settings.
        weights: open the files of weights of names on the hub too, which downloads them; those of folders always are.

    Raises:
        ConfigError: a model or adapter that is not to be found, without a tokenizer that can be loaded, or that does
            not suit the settings.
        ConvertError: what is wrong with their folders.
    """
    source = located(config, "model.model_name", weights=weights)
    outline = _outline(config, source, weights=weights or source.name is None)
    assert outline.tokenizer is not None, "a folder without one was refused"
    adapter = _adapter(config, outline, weights)
    tokenizer = outline.tokenizer if adapter is None else _larger(outline.tokenizer, adapter.tokenizer)
    return OpenModel(source, outline, adapter, tokenizer)


def open_shapes(config: TrainConfig) -> OpenShapes:
    """Open as much of a run's model as its shapes take; what `open_model` would refuse is refused.

    The folder may lack weights, which are then taken to be as config.json says, and a tokenizer. A model on the hub is
    not downloaded but for its small files, an adapter is.

    Args:
        config: the settings.

    Raises:
        ConfigError: as for `open_model`.
        ConvertError: as for `open_model`.
    """
    source = located(config, "model.model_name", weights=False)
    there = source.name is None and any(any(source.folder.glob(pattern)) for pattern in WEIGHT_FILES)
    outline = _outline(config, source, weights=there, tokenizer=False)
    return OpenShapes(source, outline, _adapter(config, outline, True))


def _outline(config: TrainConfig, source: Source, **needed: bool) -> Outline:
    model = config.model
    with _within("model", model):
        return read_outline(
            source.folder,
            max_seq_length=model.max_seq_length,
            float32_modules=model.float32_modules,
            new_tokens=model.new_tokens,
            rope_scaling=model.rope_scaling,
            **needed,
        )


def _adapter(config: TrainConfig, outline: Outline, weights: bool) -> OpenAdapter | None:
    """The adapter to start from; the settings of a fresh one are looked at."""
    _check_routers(config, outline)
    outline = dataclasses.replace(outline, config=_with_score(config, outline))
    if config.lora.adapter is not None:
        return _open_adapter(config, outline, weights)
    if not config.model.full_finetuning:
        with _within("lora", config.lora):
            _fresh(config, outline)
    return None


def adapter_notes(config: TrainConfig, opened: OpenModel) -> list[str]:
    """Sentences for the user about the adapter of a run.

    Args:
        config: its settings.
        opened: its folders.
    """
    if opened.adapter is not None and opened.adapter.arrays is not None and opened.outline.weights is not None:
        place = opened.source.name or str(opened.source.folder)
        given = held_as(opened.outline.weights, config.model.load_in_4bit, name=place)
        adapter = opened.adapter.arrays
        notes = base_notes(adapter.config.base_model_name_or_path, adapter.over, given)
        return [f"lora.adapter: {note}" for note in notes]
    if config.lora.adapter is not None or config.model.full_finetuning:
        return []
    outline = dataclasses.replace(opened.outline, config=_with_score(config, opened.outline))
    note = tables_note(_fresh(config, outline), outline.config)
    return [] if note is None else [f"lora.{note}"]


def _fresh(config: TrainConfig, outline: Outline) -> AdapterConfig:
    settings = lora_arguments(config.lora)
    del settings["random_state"]
    return fresh_adapter(outline.config, outline.new_token_ids, **settings)


def _with_score(config: TrainConfig, outline: Outline) -> ModelConfig:
    """The model's settings with the head that the run trains."""
    if not config.preferences.scores:
        if outline.config.scored:
            raise ConfigError(
                f"model.model_name: expected a model with logits with preferences.loss: "
                f"{config.preferences.loss or 'null'}, got a reward model, whose head is one score"
            )
        return outline.config
    try:
        return with_score(outline.config)
    except ConvertError as error:
        raise ConfigError(f"preferences.loss: reward: {error}") from error


def _check_routers(config: TrainConfig, outline: Outline) -> None:
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        value = getattr(config.training, name)
        if value and outline.config.moe is None:
            raise ConfigError(f"training.{name}: expected 0, since the model has no mixture of experts, got {value}")


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


def _open_adapter(config: TrainConfig, outline: Outline, weights: bool) -> OpenAdapter:
    """The adapter to start from, whose settings fit the model."""
    source = located(config, "lora.adapter", weights=weights)
    folder, base = source.folder, outline.config
    if weights or source.name is None:
        allow = config.model.allow_nonfinite
        return OpenAdapter(*open_fitting(folder, base, outline.new_token_ids, allow_nonfinite=allow))
    adapter, tokenizer = config_from_json(read_json(folder / CONFIG), folder / CONFIG), own_tokenizer(folder)
    rows = max(base.vocab_size, adapter_rows(adapter, {}, tokenizer))
    check_adapter(adapter, dataclasses.replace(base, vocab_size=rows), outline.new_token_ids, folder)
    return OpenAdapter(None, tokenizer)


def _larger(base: "PreTrainedTokenizerFast", own: "PreTrainedTokenizerFast | None") -> "PreTrainedTokenizerFast":
    return own if own is not None and vocabulary_size(own) >= vocabulary_size(base) else base


@contextlib.contextmanager
def _within(name: str, section: object) -> Iterator[None]:
    """Name the section in an error that begins with one of its keys."""
    try:
        yield
    except ConfigError as error:
        if str(error).partition(":")[0] not in vars(section):
            raise
        raise ConfigError(f"{name}.{error}") from error
