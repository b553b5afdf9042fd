"""An adapter's modules over a model's frozen weights, arranged as its layer stacks."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from convert.adapters import AdapterConfig
from convert.model.config import ModelConfig
from convert.model.paths import WeightPath
from fastjax.execution.stacks import arrange, layer_of
from fastjax.lora.attach import Adapters, make_adapters
from fastjax.models.layout import LayerStack, array_at
from fastjax.models.precision import Precision
from fastjax.quantization import dequantize


def build_adapters(
    adapter: AdapterConfig,
    config: ModelConfig,
    plan: Sequence[LayerStack],
    weights: Mapping[str, Any],
    arrays: Mapping[str, Any] | None,
    key: PRNGKeyArray,
    precision: Precision,
) -> Adapters:
    """The adapter modules that `Decoder` takes: `layers` by stack and position.

    Args:
        adapter: PEFT's settings.
        config: the model's.
        plan: its layer stacks; equal adapters within one.
        weights: the frozen weights as `Decoder` takes them.
        arrays: an adapter's arrays by path as `convert.adapters` names them; None: fresh ones.
        key: random state of fresh ones; each module draws from it by its own path.
        precision: dtypes of the trained arrays.

    Raises:
        ConfigError: arrays that are missing, left over, or of the wrong shape (all named).
    """
    alone = {spec.path.module for spec in config.specs if spec.group is None}

    def frozen(module: WeightPath) -> Array:
        if module.layer is None:
            return weights[module.part]["weight"]
        layer = layer_of(weights["layers"], plan, module.layer)
        if module in alone:
            return dequantize(array_at(layer, module.inside.with_leaf("weight")), jnp.float32)
        group = config.group_of(module)
        return dequantize(array_at(layer, group.path), jnp.float32)[group.place(module.part)[1]]

    def dtype(module: WeightPath) -> jnp.dtype:
        return precision.weight_dtype(module, trained=True)

    found = make_adapters(adapter, config, arrays, key, frozen=frozen, dtype=dtype)
    return found._replace(layers=arrange(found.layers, plan))
