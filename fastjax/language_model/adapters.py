"""Adapters on a model: fresh or from a PEFT folder, with the folder's vocabulary."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PRNGKeyArray

from convert.adapter_config import CONFIG as ADAPTER_CONFIG
from convert.adapter_config import SCORED
from convert.adapters import AdapterConfig
from convert.hub import fetch
from convert.model.paths import SCORE, TABLES, WeightPath
from convert.quantization_aware import QuantizationAware
from convert.trained_over import base_notes
from fastjax.data.tokenizer import vocabulary_size
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.execution.opening import check_no_run
from fastjax.execution.places import Places
from fastjax.execution.stacks import arrange, layer_of, plan_layers, rearrange
from fastjax.language_model.host import (
    has_host_embedding,
    has_host_layers,
    with_device_embedding,
    with_host_embedding,
)
from fastjax.language_model.rewards import with_score_head
from fastjax.language_model.variants import with_fake_quantization
from fastjax.lora.attach import Adapters, make_adapters
from fastjax.lora.fit import OpenAdapter, open_fitting
from fastjax.lora.params import LoraParam, SavedParam
from fastjax.lora.settings import LoraSettings, fresh_adapter
from fastjax.lora.sites import adapter_sites, layer_signatures
from fastjax.lora.tables import adapter_rows
from fastjax.models.decoder import Decoder
from fastjax.models.layout import LayerStack, array_at, signature
from fastjax.models.new_rows import grown
from fastjax.models.vocabulary import with_vocab_size
from fastjax.quantization import dequantize

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
    adapted = layer_signatures(sites, count)
    shapes = [jax.eval_shape(lambda i=i: layer_of(runs, model.plan, i)) for i in range(count)]
    kinds = [(model.precision.layer_kind(model.config, i), model.execution.policy(i)) for i in range(count)]
    plan = plan_layers(
        [(signature(shapes[i]), adapted[i], kinds[i]) for i in range(count)], scans=model.execution.scans
    )
    if plan != model.plan and has_host_layers(model):
        places = Places(model.config, plan, offload_layers=True)
        for index in range(count):
            places.put(index, layer_of(runs, model.plan, index))
        runs = places.stacks
    else:
        runs = rearrange(runs, model.plan, plan)
    weights = {**model.frozen, "layers": runs}
    adapters = _build_adapters(model, adapter, plan, weights, arrays, key)
    decoder = Decoder(model.config, plan, weights, adapters, precision=model.precision, executor=model.execution)
    graphdef, trainable, frozen = nnx.split(decoder, nnx.Any(LoraParam, SavedParam), ...)
    return model.replace(
        graphdef=graphdef,
        trainable=nnx.to_pure_dict(trainable),
        frozen=nnx.to_pure_dict(frozen),
        plan=plan,
        lora=adapter,
    )


def _build_adapters(
    model: LanguageModel,
    adapter: AdapterConfig,
    plan: Sequence[LayerStack],
    weights: Mapping[str, Any],
    arrays: Mapping[str, Any] | None,
    key: PRNGKeyArray,
) -> Adapters:
    """The adapter modules of a model whose frozen weights are arranged as the plan's stacks: by stack and position."""
    config = model.config
    alone = {spec.path.module for spec in config.specs if spec.group is None}

    def frozen(module: WeightPath) -> Array:
        if module.layer is None:
            return weights[module.part]["weight"]
        layer = layer_of(weights["layers"], plan, module.layer)
        if module in alone:
            return dequantize(array_at(layer, module.inside.with_leaf("weight")), jnp.float32)
        group = config.group_of(module)
        return dequantize(array_at(layer, group.path), jnp.float32)[group.part_rows(module.part)]

    def dtype(module: WeightPath) -> jnp.dtype:
        return model.precision.weight_dtype(module, trained=True)

    adapters = make_adapters(adapter, config, arrays, key, frozen=frozen, dtype=dtype)
    return adapters._replace(layers=arrange(adapters.layers, plan))


def with_fresh_adapter(model: LanguageModel, settings: LoraSettings) -> LanguageModel:
    """A model with a fresh adapter attached.

    Args:
        model: without adapters.
        settings: of the adapter.

    Raises:
        ConfigError: a value that is not supported, or settings that match no module.
    """
    return attach_adapter(model, _settings_of(model, settings), None, jax.random.key(settings.random_state))


def has_adapter(model: LanguageModel, settings: LoraSettings) -> bool:
    """Whether a model has an adapter of these settings already, fresh or trained.

    Args:
        model: with an adapter or without.
        settings: of an adapter; the seed of its start does not count.
    """
    return model.lora is not None and model.lora == _settings_of(model, settings)


def _settings_of(model: LanguageModel, settings: LoraSettings) -> AdapterConfig:
    name, revision = model.source or (None if model.folder is None else str(model.folder), None)
    named = {"base_model_name_or_path": name, "revision": revision}
    return fresh_adapter(model.config, settings, model.new_token_ids, **named)


def load_adapter(
    model: LanguageModel,
    folder: str | Path,
    lora_dropout: float | None = None,
    allow_nonfinite: bool = False,
    fake_quantization: bool = True,
) -> LanguageModel:
    """Attach the adapter of a PEFT folder, to generate with it or to train it on.

    A tokenizer in the folder, with its chat template, becomes the model's, unless it knows fewer tokens. Where the
    adapter was trained with new tokens, the model's tables grow by their rows.

    Args:
        model: without adapters.
        folder: adapter_config.json and adapter_model.safetensors; or a name on the hub, as of a model.
        lora_dropout: in place of the adapter's own.
        allow_nonfinite: let NaN and infinity in its arrays through.
        fake_quantization: of an adapter from quantisation-aware training, compute as it was trained.

    Raises:
        ConvertError: what is wrong with the folder.
        ConfigError: it is not for this model (every misfit named).
    """
    source = fetch(folder)
    check_no_run(source.folder, "the folder of an adapter", ADAPTER_CONFIG)
    check_bare(model)
    opened = open_fitting(source.folder, model.config, model.new_token_ids, allow_nonfinite=allow_nonfinite)
    return add_adapter(model, opened, lora_dropout, fake_quantization=fake_quantization)


def add_adapter(
    model: LanguageModel,
    opened: OpenAdapter,
    lora_dropout: float | None = None,
    *,
    fake_quantization: bool = True,
) -> LanguageModel:
    """Attach the adapter of an open PEFT folder, compute as it was trained, and tell of a base unlike its own.

    Args:
        model: without adapters.
        opened: the folder, with its arrays.
        lora_dropout: in place of the adapter's own.
        fake_quantization: of an adapter from quantisation-aware training, compute as it was trained.

    Raises:
        ConvertError: as for `attach_opened`.
        ConfigError: as for `attach_opened`.
    """
    check_bare(model)
    assert opened.arrays is not None
    named = opened.arrays.config.base_model_name_or_path
    for note in [] if model.base is None else base_notes(named, opened.arrays.over, model.base):
        print(f"note: {note}", file=sys.stderr)
    model = attach_opened(model, opened, lora_dropout)
    aware = QuantizationAware.read(opened.arrays.folder) if fake_quantization else None
    return model if aware is None else with_fake_quantization(model, *aware)


def attach_opened(model: LanguageModel, opened: OpenAdapter, lora_dropout: float | None = None) -> LanguageModel:
    """Attach the adapter of a PEFT folder that is open (`lora.fit.open_fitting`).

    Args:
        model: without adapters.
        opened: the folder, with its arrays.
        lora_dropout: in place of the adapter's own.

    Raises:
        ConvertError: an array that cannot be read or is not finite.
        ConfigError: an adapter that does not fit the model.
    """
    check_bare(model)
    if has_host_embedding(model):
        return with_host_embedding(attach_opened(with_device_embedding(model), opened, lora_dropout))
    folder = opened.arrays
    assert folder is not None, "the adapter's arrays are on this machine"
    adapter, arrays = folder.config, {path: folder.read(path) for path in folder.tensors}
    if adapter.task_type == SCORED and f"{SCORE}.modules_to_save.weight" in arrays:
        model = with_score_head(model)  # whose own score gives way to the adapter's
    if lora_dropout is not None:
        adapter = dataclasses.replace(adapter, lora_dropout=lora_dropout)
    model = _with_vocabulary_of(model, opened.tokenizer, adapter, arrays)
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
                rows_here = weights[name]["weight"]
                weights[name] = {
                    "weight": rows_here.at[before:].set(jnp.asarray(table[before:]).astype(rows_here.dtype))
                }
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
        raise ConfigError(
            "model: expected one for an adapter, got one loaded with full_finetuning=True; train it as it is, or load "
            "it with full_finetuning=False"
        )
    if model.lora is not None:
        raise ConfigError(
            "model: expected one without an adapter, got one that has one, as a base has after the training of an "
            "adapter that was added to it; load it again, or add adapters to its value as it was before (base.value)"
        )
