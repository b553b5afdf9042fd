"""A model's tree of zeros, for shapes: traced by `jax.eval_shape` it takes no memory and no time."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert.checkpoint import CONFIG
from convert.formats import FORMATS, Format, nvfp4
from convert.formats.compressed import group_weights
from convert.formats.declared import declared_format
from convert.formats.fp8 import block_shape
from convert.formats.mxfp4 import BLOCK
from convert.model.paths import WeightPath
from convert.model.spec import WeightSpec
from fastjax.execution.execution import Execution
from fastjax.execution.load import WeightFormat, choose_formats, plan_stacks, quantize_matrix
from fastjax.execution.opening import OpenModel
from fastjax.execution.options import LoadOptions
from fastjax.execution.places import fill_tree
from fastjax.models.layout import LayerStack
from fastjax.models.precision import Precision
from fastjax.quantization import FP8Weight, Int4Weight, MXFP4Weight, NVFP4Weight, WeightLike
from pallas_kernels.nf4 import DYNAMIC_MAP


def zero_weights(
    opened: OpenModel, options: LoadOptions, precision: Precision, execution: Execution
) -> tuple[tuple[LayerStack, ...], dict[str, Any]]:
    """The result of `load_weights` with zeros for values.

    Args:
        opened: the model, whose weights' headers say how each is stored; where there are none config.json does.
        options: of loading it.
        precision: the dtypes of weights that are not quantised.
        execution: its loop, and the policy that the layers of one stack have in common.
    """
    config, hf_config, weights = opened.config, opened.hf_config, opened.weights

    def stored(spec: WeightSpec) -> tuple[Format, str]:
        if weights is None:
            return declared_format(hf_config, spec)
        return FORMATS[weights.format(spec.path)], weights.decoded_dtype(spec.path).name

    formats = choose_formats(config.specs, {spec.path: stored(spec) for spec in config.specs}, options, precision)
    plan = plan_stacks(config, formats, options, precision, execution)
    block = _block(hf_config)

    @functools.cache  # layers are alike
    def zeros(shape: tuple[int, ...], form: WeightFormat) -> WeightLike:
        return _zeros(shape, form, block, hf_config)

    def everything() -> Iterator[tuple[WeightPath, WeightLike]]:
        for spec in config.specs:
            yield spec.path, zeros(spec.shape, formats[spec.path])

    return plan, fill_tree(config, plan, everything())


def _groups(hf_config: Mapping[str, Any], columns: int) -> tuple[int, bool]:
    """Groups in a row of int4's, and whether they have zero points."""
    quantization = hf_config.get("quantization_config") or {}
    weights = next((weights for _, weights in group_weights(quantization)), {})
    size = weights.get("group_size")
    return columns // size if size and size > 0 else 1, weights.get("symmetric") is False


def _block(hf_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of FP8's blocks; None: one scale a row."""
    quantization = hf_config.get("quantization_config") or {}
    return block_shape(hf_config, CONFIG) if quantization.get("quant_method") == "fp8" else None


def _zeros(
    shape: tuple[int, ...], form: WeightFormat, block: tuple[int, int] | None, hf_config: Mapping[str, Any]
) -> WeightLike:
    *experts, out, into = shape if len(shape) > 1 else (1, *shape)
    if form.name is None:
        return jnp.zeros(shape, form.dtype)
    if form.name == "fp8":
        rows, columns = block or (1, into)
        scales = jnp.zeros((*experts, math.ceil(out / rows), math.ceil(into / columns)), jnp.float32)
        return FP8Weight(jnp.zeros(shape, jnp.float8_e4m3fn), scales, (rows, columns), (out, into), form.dtype)
    if form.name in ("int8", "int8-packed"):
        scales = jnp.zeros((*experts, out, 1), jnp.float32)
        return FP8Weight(jnp.zeros(shape, jnp.int8), scales, (1, into), (out, into), form.dtype)
    if form.name in ("int4", "int4-bytes"):
        groups, zeros = _groups(hf_config, into)
        codes, scales = jnp.zeros((*experts, out, into // 2), jnp.uint8), jnp.zeros((*experts, out, groups), form.dtype)
        points = jnp.zeros((*experts, out, groups), jnp.int8) if zeros else None
        return Int4Weight(codes, scales, points, (out, into), form.dtype)
    if form.name in ("nvfp4", "nvfp4-modelopt"):
        codes = jnp.zeros((*experts, out, into // 2), jnp.uint8)
        scales = jnp.zeros((*experts, out, into // nvfp4.BLOCK), jnp.float8_e4m3fn)
        whole = jnp.zeros((*experts, out, 1), jnp.float32)
        return NVFP4Weight(codes, scales, whole, form.name == "nvfp4", (out, into), form.dtype)
    if form.name in ("mxfp4", "mxfp4-rows"):
        codes, scales = (jnp.zeros((*experts, out, into // n), jnp.uint8) for n in (2, BLOCK))
        return MXFP4Weight(codes, scales, (out, into), form.dtype)
    weight = quantize_matrix(jnp.zeros(shape, form.dtype), form.name == "nf4-nested")
    if weight.nested_quant_map is None:
        return weight
    # A constant: parts of one weight are joined where their maps have equal values.
    return dataclasses.replace(weight, nested_quant_map=np.broadcast_to(DYNAMIC_MAP, weight.nested_quant_map.shape))
