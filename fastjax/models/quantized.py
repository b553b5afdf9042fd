"""Fake quantisers on the projections of a decoder's layers: quantisation-aware training.

Embedding, norms and head stay as they are. Layers of one stack have one description, so a module is left out in all of
them or in none.
"""

import dataclasses

from convert.errors import shown
from convert.model.paths import WeightPath
from convert.quantization_aware import QuantizationAware
from fastjax.errors import ConfigError
from fastjax.lora.quantized import Quantizer
from fastjax.models.decoder import Decoder
from fastjax.models.layout import LayerStack
from fastjax.models.module_names import module_paths
from fastjax.models.moe import Mixture
from fastjax.models.projection import Projection
from fastjax.quantization.fake import ACTIVATIONS, GGML, WEIGHTS
from fastjax.quantization.weights import as_weight

#: What packed weights of a base are called, by the only format of theirs that merged ones may go to.
_OWN = {"nf4": ("NF4",)}


def quantize_layers(decoder: Decoder, aware: QuantizationAware, *, dtype: str, trained: bool, packed: bool) -> None:
    """Give the projections of a decoder's layers their fake quantisers.

    Args:
        decoder: with its adapters; changed.
        aware: what it is trained for.
        dtype: of the folder's weights.
        trained: whether the weights themselves are trained.
        packed: whether the folder's are quantised.

    Raises:
        ConfigError: a format, a module or an adapter that is not served.
    """
    for name, value, table in (("weights", aware.weights, WEIGHTS), ("activations", aware.activations, ACTIVATIONS)):
        if (value is not None or table is WEIGHTS) and value not in tuple(table):
            raise ConfigError(f"qat.{name}: expected one of {', '.join(table)}, got {shown(value)}")
    left_out = module_paths(aware.modules_to_not_quantize, decoder.config, "qat.modules_to_not_quantize")
    activations = None if aware.activations is None else ACTIVATIONS[aware.activations]
    scheme = WEIGHTS[aware.weights]
    if isinstance(scheme, GGML):  # of a file that is made of the folder, and decodes to float32
        scheme, dtype = dataclasses.replace(scheme, folder=dtype), "float32"
    quantizer = Quantizer(scheme, activations, dtype, trained, packed)
    count = 0
    for stack, layers in zip(decoder.plan, decoder.layers, strict=True):
        for position, layer in enumerate(layers):
            if isinstance(layer.mlp, Mixture):
                raise ConfigError("qat: expected a model without mixtures of experts, got one with them")
            for block, module in ((layer.block, layer.mixer), ("mlp", layer.mlp)):
                for projection in (*module.inner, *module.outer):
                    if not _left_out(projection, block, stack, position, left_out):
                        _check(projection, f"layers.{stack.start + position}.{block}", aware)
                        projection.quantizer = quantizer
                        count += 1
    if not count:
        raise ConfigError("qat.modules_to_not_quantize: expected a projection that is quantised, got none")


def _left_out(
    projection: Projection, block: str, stack: LayerStack, position: int, left_out: frozenset[WeightPath]
) -> bool:
    """Whether a projection is left out, with all its parts, in every layer of a stack."""
    places = [stack.start + position + stack.period * repeat for repeat in range(stack.count)]
    paths = [WeightPath(place, block, part, "") for place in places for part, _ in projection.parts]
    excluded = [path for path in paths if path in left_out]
    if excluded and len(excluded) < len(paths):
        together = ", ".join(part for part, _ in projection.parts)
        raise ConfigError(
            f"qat.modules_to_not_quantize: expected {block}.({together}) together, which are one product, and in all "
            f"of the equal layers {places[0]} to {places[-1]}, or in none, got {', '.join(excluded[:4])} alone"
            + ("; layers may differ where they are unrolled" if len(places) > 1 else "")
        )
    return bool(excluded)


def _check(projection: Projection, where: str, aware: QuantizationAware) -> None:
    """Refuse what a fake quantiser does not serve."""
    weight, scheme = as_weight(projection.weight.get_value()), aware.weights
    names = ", ".join(part for part, _ in projection.parts)
    if projection.base_compute is not None:
        raise ConfigError(
            f"base_compute: expected none with qat, whose formats have their own values, got {projection.base_compute}"
        )
    if projection.float32:
        raise ConfigError(
            f"float32_modules: expected none of {where}.({names}) with qat, or these in qat.modules_to_not_quantize too"
        )
    plain = all(name in ("bfloat16", "float16", "float32") for name in weight.formats)
    if not plain and weight.formats != _OWN.get(scheme):
        raise ConfigError(
            f"qat.weights: expected a base in 16 or 32 bits (load_in_4bit: false) with {scheme}, got "
            f"{' and '.join(weight.formats)} weights in {where}.({names}); a base in NF4 is served with nf4"
        )
    for name, chosen, table in (("weights", scheme, WEIGHTS), ("activations", aware.activations, ACTIVATIONS)):
        reason = None if chosen is None else table[chosen].why_not(weight.shape[-1])
        if reason is not None:
            raise ConfigError(f"qat.{name}: expected a format for {where}.({names}), got {chosen}: {reason}")
    for part, adapter in projection.adapters.items():
        if adapter.magnitude is not None or adapter.dropout:
            what = "use_dora: false" if adapter.magnitude is not None else "lora_dropout: 0"
            raise ConfigError(f"qat: expected {what}, since the product is with the merged weight, got it on {part}")
