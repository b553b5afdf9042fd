"""An adapter on a model: attached fresh or from a PEFT folder, with the vocabulary that the folder has."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray

from convert.adapters import AdapterConfig, read_adapter
from convert.families import family_for
from convert.model.paths import TABLES
from fastjax.data.new_tokens import own_tokenizer, vocabulary_size
from fastjax.errors import ConfigError
from fastjax.lora.params import LoraParam, SavedParam
from fastjax.lora.settings import check_adapter
from fastjax.lora.sites import adapter_sites, layer_signatures
from fastjax.lora.tables import adapter_rows
from fastjax.models.adapters import build_adapters
from fastjax.models.decoder import Decoder
from fastjax.models.layout import layer_of, plan_layers, rearrange, signature
from fastjax.models.new_rows import grown
from fastjax.models.vocabulary import with_vocab_size

if TYPE_CHECKING:
    from fastjax.language_model import LanguageModel


def attach_adapter(
    model: "LanguageModel", adapter: AdapterConfig, arrays: Mapping[str, Any] | None, key: PRNGKeyArray
) -> "LanguageModel":
    """A model with an adapter attached, the functional form of `get_peft_model` and `load_adapter`.

    Args:
        model: without adapters, not loaded for full fine-tuning.
        adapter: PEFT's settings.
        arrays: the adapter's arrays as `convert.adapters.read_adapter` gives them; None: fresh ones.
        key: random state of fresh ones.

    Raises:
        ConfigError: an adapter that does not fit the model.
    """
    _check_bare(model)
    count = model.config.num_hidden_layers
    sites = adapter_sites(adapter, model.config)
    runs = [[model.frozen["layers"][r][p] for p in range(run.period)] for r, run in enumerate(model.plan)]
    own = layer_signatures(sites, count)
    shapes = [jax.eval_shape(lambda i=i: layer_of(runs, model.plan, i)) for i in range(count)]
    signatures = [(signature(shapes[i]), own[i], model.precision.layer_kind(model.config, i)) for i in range(count)]
    plan = plan_layers(signatures, model.layer_loop)
    weights = {**model.frozen, "layers": rearrange(runs, model.plan, plan)}
    adapters = build_adapters(adapter, model.config, plan, weights, arrays, key, model.precision)
    decoder = Decoder(model.config, plan, weights, adapters, precision=model.precision, remat=model.remat)
    graphdef, trainable, frozen = nnx.split(decoder, nnx.Any(LoraParam, SavedParam), ...)
    return model.replace(
        graphdef=graphdef,
        trainable=nnx.to_pure_dict(trainable),
        frozen=nnx.to_pure_dict(frozen),
        plan=plan,
        lora=adapter,
    )


def load_adapter(
    model: "LanguageModel", folder: str | Path, lora_dropout: float | None, allow_nonfinite: bool
) -> "LanguageModel":
    """`FastLanguageModel.load_adapter`."""
    _check_bare(model)
    adapter, arrays = read_adapter(folder, family=family_for(model.hf_config), allow_nonfinite=allow_nonfinite)
    if lora_dropout is not None:
        adapter = dataclasses.replace(adapter, lora_dropout=lora_dropout)
    model = _with_vocabulary_of(model, Path(folder), adapter, arrays)
    check_adapter(adapter, model.config, model.new_token_ids, folder)
    return attach_adapter(model, adapter, arrays, jax.random.key(0))


def _with_vocabulary_of(
    model: "LanguageModel", folder: Path, adapter: AdapterConfig, arrays: Mapping[str, Any]
) -> "LanguageModel":
    """The model with the tokenizer that an adapter was trained with, and its rows where these are more than its own."""
    tokenizer = own_tokenizer(folder)
    rows = adapter_rows(adapter, {path: array.shape for path, array in arrays.items()}, tokenizer)
    before = model.config.vocab_size
    if rows > before:
        weights = grown(model.frozen, rows, before if model.tokenizer is None else vocabulary_size(model.tokenizer), ())
        for name in TABLES:  # PEFT keeps the tables that it has grown
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


def _check_bare(model: "LanguageModel") -> None:
    if model.lora is not None or model.full_finetuning:
        raise ConfigError("an adapter needs a model without adapters that was not loaded with full_finetuning")
