"""A model's arrays computed in another way: another policy, fake quantisers, or beside those that they began with."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx

from fastjax.errors import ConfigError
from fastjax.execution.language_model import Model
from fastjax.models.leaves import START
from fastjax.models.quantized import QuantizationAware, quantize_layers
from fastjax.models.start import hold


def with_checkpointing(model: Model, remat: str) -> Model:
    """Give a model another rematerialisation policy.

    Args:
        model: any.
        remat: one of `execution.remat.POLICIES`.
    """
    if remat != model.execution.remat:
        model = model.executed(dataclasses.replace(model.execution, remat=remat))
    return model.with_options(use_gradient_checkpointing=remat)


def with_start(model: Model, arrays: Any) -> Model:
    """Let a model hold arrays as those it begins with: the reference of a loss of preferences.

    Args:
        model: any.
        arrays: of the tree of `trainable`; None: it holds none any more.
    """
    if arrays is None and START not in model.frozen:
        return model
    module = model.module()
    hold(module, arrays)
    graphdef, _, frozen = nnx.split(module, model.trainable_filter, ...)
    return model.replace(graphdef=graphdef, frozen=nnx.to_pure_dict(frozen))


def with_fake_quantization(
    model: Model, weights: str, activations: str | None = None, modules_to_not_quantize: Sequence[str] = ()
) -> Model:
    """Give the layers' projections fake quantisers, so that they compute as they will after quantisation.

    An adapter is merged into the weight for each product, as `save_pretrained_merged` will.

    Args:
        model: any.
        weights: format of the layers' matrices, a key of `quantization.fake.WEIGHTS`.
        activations: of their inputs, a key of `ACTIVATIONS`; None: these stay.
        modules_to_not_quantize: names of modules, or ends of names, that are left out.

    Raises:
        ConfigError: a format, a module or an adapter that is not served.
    """
    aware, dtype = QuantizationAware(weights, activations, tuple(modules_to_not_quantize)), model.folder_dtype
    if not model.full_finetuning and str(model.dtype) not in (dtype, "float32"):
        raise ConfigError(f"dtype: expected {dtype}, the folder's, or float32 with qat, got {model.dtype}")
    module = model.module()
    packed = "quantization_config" in model.hf_config
    quantize_layers(module, aware, dtype=dtype, trained=model.full_finetuning, packed=packed)
    quantized = model.of_module(module).replace(quantization_aware=aware)
    return quantized.executed(model.execution.without_chunks("qat"))
