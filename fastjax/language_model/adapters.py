"""Adapters on a model: fresh or from a PEFT folder, with the folder's vocabulary."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray

from convert.adapter_config import CONFIG as ADAPTER_CONFIG
from convert.adapter_config import SCORED, config_from_json
from convert.adapters import Adapter, AdapterConfig
from convert.checkpoint import CONFIG
from convert.files import read_json
from convert.hub import Source, fetch
from convert.model.paths import SCORE, TABLES
from convert.quantization_aware import QuantizationAware
from convert.trained_over import base_notes
from fastjax.data.new_tokens import vocabulary_size
from fastjax.errors import ConfigError
from fastjax.execution.adapters import build_adapters
from fastjax.execution.language_model import LanguageModel
from fastjax.execution.places import Places
from fastjax.execution.stacks import layer_of, plan_layers, rearrange
from fastjax.language_model.host import (
    has_host_embedding,
    has_host_layers,
    with_device_embedding,
    with_host_embedding,
)
from fastjax.language_model.rewards import with_score_head
from fastjax.language_model.variants import with_fake_quantization
from fastjax.lora.fit import open_fitting
from fastjax.lora.params import LoraParam, SavedParam
from fastjax.lora.settings import fresh_adapter
from fastjax.lora.sites import adapter_sites, layer_signatures
from fastjax.lora.tables import adapter_rows
from fastjax.models.decoder import Decoder
from fastjax.models.layout import signature
from fastjax.models.new_rows import grown
from fastjax.models.outline import read_outline
from fastjax.models.vocabulary import with_vocab_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def attach_adapter(
    model: LanguageModel, adapter: AdapterConfig, arrays: Mapping[str, Any] | None, key: PRNGKeyArray
) -> LanguageModel:
    """A model with an adapter attached, the functional form of `get_peft_model` and `load_adapter`.

    Args:
        model: without adapters, not loaded for full fine-tuning.
        adapter: PEFT's settings.
        arrays: the adapter's arrays by `convert.adapters`' names; None: fresh ones.
        key: random state of fresh ones.

    Raises:
        ConfigError: an adapter that does not fit the model.
    """
    check_bare(model)
    if has_host_embedding(model):
        return with_host_embedding(attach_adapter(with_device_embedding(model), adapter, arrays, key))
    count = model.config.num_hidden_layers
    sites = adapter_sites(adapter, model.config)
    runs = [[model.frozen["layers"][r][p] for p in range(run.period)] for r, run in enumerate(model.plan)]
    own = layer_signatures(sites, count)
    shapes = [jax.eval_shape(lambda i=i: layer_of(runs, model.plan, i)) for i in range(count)]
    kinds = [(model.precision.layer_kind(model.config, i), model.execution.policy(i)) for i in range(count)]
    plan = plan_layers([(signature(shapes[i]), own[i], kinds[i]) for i in range(count)], model.execution.layer_loop)
    if plan != model.plan and has_host_layers(model):
        places = Places(model.config, plan, offload_layers=True)
        for index in range(count):
            places.put(index, layer_of(runs, model.plan, index))
        runs = places.stacks
    else:
        runs = rearrange(runs, model.plan, plan)
    weights = {**model.frozen, "layers": runs}
    adapters = build_adapters(adapter, model.config, plan, weights, arrays, key, model.precision)
    decoder = Decoder(model.config, plan, weights, adapters, precision=model.precision, executor=model.execution)
    graphdef, trainable, frozen = nnx.split(decoder, nnx.Any(LoraParam, SavedParam), ...)
    return model.replace(
        graphdef=graphdef,
        trainable=nnx.to_pure_dict(trainable),
        frozen=nnx.to_pure_dict(frozen),
        plan=plan,
        lora=adapter,
    )


def with_fresh_adapter(model: LanguageModel, *, random_state: int, **settings: Any) -> LanguageModel:
    """A model with a fresh adapter attached.

    Args:
        model: without adapters.
        random_state: seed of the adapter.
        settings: as of `lora.settings.fresh_adapter`.

    Raises:
        ConfigError: a value that is not supported, or settings that match no module.
    """
    name, revision = model.source or (None if model.folder is None else str(model.folder), None)
    named = {"base_model_name_or_path": name, "revision": revision}
    adapter = fresh_adapter(model.config, model.new_token_ids, **named, **settings)
    return attach_adapter(model, adapter, None, jax.random.key(random_state))


def base_and_adapter(source: Source) -> tuple[Source, Path | None]:
    """The model that a folder is, or the one that its adapter was trained over, and the adapter's folder.

    Args:
        source: a model, or an adapter without one.

    Raises:
        ConvertError: what is wrong with the adapter's settings, or no such base.
        ConfigError: an adapter that names no base.
    """
    file = source.folder / ADAPTER_CONFIG
    if not file.is_file() or (source.folder / CONFIG).exists():
        return source, None
    adapter = config_from_json(read_json(file), file)
    if adapter.base_model_name_or_path is None:
        raise ConfigError(
            f"{file}: base_model_name_or_path: expected the base's folder or name, got none; load the base, then the "
            "adapter by FastLanguageModel.load_adapter"
        )
    return fetch(adapter.base_model_name_or_path, adapter.revision), source.folder


def check_fits(model_name: str | Path, adapter: str | Path, rope_scaling: Mapping[str, Any] | None = None) -> None:
    """Refuse an adapter that is for another model before weights are read.

    Args:
        model_name: the base's folder, or its name on the hub.
        adapter: the adapter's folder, or its name on the hub.
        rope_scaling: as for `FastLanguageModel.from_pretrained`.

    Raises:
        ConvertError: what is wrong with either folder.
        ConfigError: the adapter is not for this model (the first misfits named).
    """
    source, own = base_and_adapter(fetch(model_name))
    if own is not None:
        raise ConfigError(f"{adapter}: expected none beside {model_name}, which is an adapter with a base of its own")
    outline = read_outline(source.folder, rope_scaling=rope_scaling, weights=False, tokenizer=False)
    open_fitting(fetch(adapter).folder, outline.config)


def add_adapter(
    model: LanguageModel,
    opened: Adapter,
    tokenizer: "PreTrainedTokenizerBase | None",
    lora_dropout: float | None = None,
    *,
    fake_quantization: bool = True,
) -> LanguageModel:
    """Attach the adapter of an open PEFT folder, compute as it was trained, and tell of a base unlike its own.

    Args:
        model: without adapters.
        opened: the folder.
        tokenizer: the folder's own; None: it has none.
        lora_dropout: in place of the adapter's own.
        fake_quantization: of an adapter from quantisation-aware training, compute as it was trained.

    Raises:
        ConvertError: as for `attach_opened`.
        ConfigError: as for `attach_opened`.
    """
    check_bare(model)
    named = opened.config.base_model_name_or_path
    for note in [] if model.base is None else base_notes(named, opened.over, model.base):
        print(f"note: {note}", file=sys.stderr)
    model = attach_opened(model, opened, tokenizer, lora_dropout)
    aware = QuantizationAware.read(opened.folder) if fake_quantization else None
    return model if aware is None else with_fake_quantization(model, *aware)


def attach_opened(
    model: LanguageModel,
    opened: Adapter,
    tokenizer: "PreTrainedTokenizerBase | None",
    lora_dropout: float | None = None,
) -> LanguageModel:
    """Attach the adapter of a PEFT folder that is open (`lora.fit.open_fitting`).

    Args:
        model: without adapters.
        opened: the folder.
        tokenizer: the folder's own; None: it has none.
        lora_dropout: in place of the adapter's own.

    Raises:
        ConvertError: an array that cannot be read or is not finite.
        ConfigError: an adapter that does not fit the model.
    """
    check_bare(model)
    if has_host_embedding(model):
        return with_host_embedding(attach_opened(with_device_embedding(model), opened, tokenizer, lora_dropout))
    adapter, arrays = opened.config, {path: opened.read(path) for path in opened.tensors}
    if adapter.task_type == SCORED and f"{SCORE}.modules_to_save.weight" in arrays:
        model = with_score_head(model)  # whose own score gives way to the adapter's
    if lora_dropout is not None:
        adapter = dataclasses.replace(adapter, lora_dropout=lora_dropout)
    model = _with_vocabulary_of(model, tokenizer, adapter, arrays)
    return attach_adapter(model, adapter, arrays, jax.random.key(0))


def _with_vocabulary_of(
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase | None",
    adapter: AdapterConfig,
    arrays: Mapping[str, Any],
) -> LanguageModel:
    """The model with the adapter's tokenizer, and the adapter's vocabulary rows where these are more than its own."""
    rows = adapter_rows(adapter, {path: array.shape for path, array in arrays.items()}, tokenizer)
    before = model.config.vocab_size
    if rows > before:
        weights = grown(model.frozen, rows, before if model.tokenizer is None else vocabulary_size(model.tokenizer), ())
        for name in TABLES:  # PEFT keeps the grown tables
            table = arrays.get(f"{name}.base_layer.weight")
            if table is not None and name in weights and "weight" in weights[name]:
                own = weights[name]["weight"]
                weights[name] = {"weight": own.at[before:].set(jax.numpy.asarray(table[before:]).astype(own.dtype))}
        model = model.replace(
            config=dataclasses.replace(model.config, vocab_size=rows),
            hf_config=with_vocab_size(model.hf_config, rows),
            frozen=weights,
        )
    sizes = [0 if known is None else vocabulary_size(known) for known in (model.tokenizer, tokenizer)]
    if sizes[0] <= sizes[1] <= model.config.vocab_size:  # as large: it may have another chat template
        model = model.replace(tokenizer=tokenizer)
    return model


def check_bare(model: LanguageModel) -> None:
    """Refuse a model that takes no adapter.

    Args:
        model: any.

    Raises:
        ConfigError: it is trained whole, or has one.
    """
    if model.full_finetuning:
        raise ConfigError("model: expected one for an adapter, got one loaded with full_finetuning=True")
    if model.lora is not None:
        raise ConfigError(
            "model: expected one without an adapter, got one that has one, as a base has after the training of an "
            "adapter that was added to it; load it again, or add adapters to its value as it was before (base.value)"
        )
