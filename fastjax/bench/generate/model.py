"""A preset's model in NF4 with random weights, and adapters that count."""

from typing import Any

import jax

from fastjax.bench.generate.settings import GenerateSettings
from fastjax.bench.step.build import with_adapters
from fastjax.language_model import LanguageModel
from fastjax.language_model.loading import random_model
from fastjax.models.leaves import LORA_B, leaf_at

_SEED = 3407
#: Of the adapters' second matrices, which begin as zeros: about what training makes of them.
_DEVIATION = 0.02


def build_model(settings: GenerateSettings, r: int, layer_loop: str) -> LanguageModel:
    """The model, of normal weights.

    Args:
        settings: of the measurement.
        r: rank of the adapters on all projections, both of whose matrices are random; 0: none.
        layer_loop: "scan" or "unroll".

    Raises:
        ConfigError: settings that the model does not take.
    """
    model = random_model(settings.hf_config, settings.load_options(layer_loop))
    if r == 0:
        return model
    model = with_adapters(model, r, "all", _SEED)
    return model.replace(trainable=_with_random_products(model.trainable))


def _with_random_products(trainable: Any) -> Any:
    """The adapters with random values for the zeros with which their products begin."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(trainable)
    keys = jax.random.split(jax.random.key(_SEED), len(leaves))
    drawn = [
        _DEVIATION * jax.random.normal(key, leaf.shape, leaf.dtype) if leaf_at(path).kind in LORA_B else leaf
        for (path, leaf), key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)
