"""Frozen weights of a model in the host's pinned memory: its table of embeddings, matrices of scanned layers."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from convert.adapters import AdapterConfig
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel, Model
from fastjax.execution.streamed import is_streamed
from fastjax.host_memory import in_host_memory, to_device_memory, to_host_memory
from fastjax.lora.sites import adapter_sites
from fastjax.models.layout import LayerStack


def check_host_embedding(config: ModelConfig, adapter: AdapterConfig | None) -> None:
    """Check that the table of embeddings may lie in the host's memory.

    Args:
        config: the model's.
        adapter: its adapter, or None.

    Raises:
        ConfigError: it may not.
    """
    if config.tie_word_embeddings:
        raise ConfigError("offload_embedding: expected false with tied embeddings, got true; the head needs the table")
    if adapter is not None and any(site.path.part == EMBEDDING for site in adapter_sites(adapter, config)):
        raise ConfigError("offload_embedding: expected false with an adapter on the embedding, got true")


def check_host_layers(plan: Sequence[LayerStack], full_finetuning: bool) -> None:
    """Check that the layers' matrices may lie in the host's memory.

    Args:
        plan: arrangement of the layers.
        full_finetuning: whether every weight is trained.

    Raises:
        ConfigError: they may not.
    """
    if full_finetuning:
        raise ConfigError("offload_layers: expected false where every weight is trained, got true")
    if all(stack.count == 1 for stack in plan):
        raise ConfigError(
            "offload_layers: expected false where no layers are scanned, got true; set scan as the loop over layers, "
            "on a model with layers of one kind"
        )


def has_host_embedding(model: LanguageModel) -> bool:
    """Whether the table of embeddings lies in the host's memory."""
    return in_host_memory(model.frozen.get(EMBEDDING, {}).get("weight"))


def with_host_embedding(model: Model) -> Model:
    """Move the table of embeddings to the host's pinned memory (`execution.host_table`).

    Raises:
        ConfigError: the table is also the head's, or something is trained on it beside rows of single tokens.
    """
    table = model.frozen.get(EMBEDDING, {}).get("weight")
    check_host_embedding(model.config, model.lora)
    if table is None or model.full_finetuning:
        raise ConfigError("offload_embedding: expected false where the embedding is trained whole, got true")
    return _with_embedding(model, to_host_memory(table)).with_options(offload_embedding=True)


def with_device_embedding(model: Model) -> Model:
    """Move the table of embeddings to the device's memory."""
    if not has_host_embedding(model):
        return model
    table = to_device_memory(model.frozen[EMBEDDING]["weight"])
    return _with_embedding(model, table).with_options(offload_embedding=False)


def _with_embedding(model: Model, table: jax.Array) -> Model:
    embedding = {**model.frozen[EMBEDDING], "weight": table}
    return model.replace(frozen={**model.frozen, EMBEDDING: embedding})


def has_host_layers(model: LanguageModel) -> bool:
    """Whether matrices of layers lie in the host's memory."""
    return any(map(in_host_memory, jax.tree.leaves(model.frozen.get("layers", {}))))


def with_host_layers(model: Model) -> Model:
    """Move the matrices of scanned layers to the host's pinned memory (`execution.streamed`).

    Raises:
        ConfigError: they are trained, or no layers are scanned.
    """
    check_host_layers(model.plan, model.full_finetuning)
    if model.quantization_aware is not None:
        raise ConfigError("offload_layers: expected false with qat, got true")

    def placed(leaf: Any, count: int) -> Any:
        return to_host_memory(leaf) if is_streamed(leaf, count) and not in_host_memory(leaf) else leaf

    layers = {
        number: jax.tree.map(functools.partial(placed, count=model.plan[number].count), stack)
        for number, stack in model.frozen["layers"].items()
    }
    return model.replace(frozen={**model.frozen, "layers": layers}).with_options(offload_layers=True)
