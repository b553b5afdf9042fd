"""From a stream of named arrays to the decoder's tree: fused, quantised and stacked, one layer at a time.

Host memory stays at what the stream holds, device memory at the finished tree plus one layer.
"""

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from convert.errors import ConvertError
from convert.finite import NOT_IN_NF4, nonfinite
from convert.formats.fp8 import FP8Tensor
from convert.formats.nf4 import NF4Tensor
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD, NORM, WeightPath
from convert.model.spec import WeightSpec
from convert.weights import Weights, open_weights, stream
from fastjax.models.layout import LayerStack, fuse_layer, plan_layers
from fastjax.models.precision import Precision
from fastjax.quantization import FP8Weight, NF4Weight
from fastjax.quantization.weights import Weight


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    precision: Precision,
    trained: bool,
    load_in_4bit: bool,
    layer_loop: str,
    allow_nonfinite: bool = False,
) -> tuple[tuple[LayerStack, ...], dict[str, Any]]:
    """Read a Hugging Face folder into the tree that `Decoder` takes.

    Args:
        folder: safetensors files and config.json.
        config: the model's.
        precision: in which dtype each weight is held that is not quantised.
        trained: whether the weights are trained themselves.
        load_in_4bit: quantise the layers' matrices, but those of float32 modules, to NF4 with nested scales. In a
            folder that is quantised already the matrices keep their format (some may be in 16 bits there); without
            `load_in_4bit` they are dequantised. In an FP8 folder they keep their 8 bits, unless they are quantised
            or trained.
        layer_loop: "scan" or "unroll".
        allow_nonfinite: let NaN and infinity through; a matrix that is quantised is refused with any.

    Returns:
        The arrangement of the layers, and the tree.

    Raises:
        ConvertError: what is wrong with the folder; NaN or infinity in it.
    """
    finite: dict[str, Array] = {}
    opened = open_weights(folder)
    formats = {path: opened.format(path) for path in opened.specs}
    quantized = any(kind.startswith("nf4") for kind in formats.values())
    quantize = load_in_4bit and not quantized

    quantizable = {path for path, spec in opened.specs.items() if _quantizable(spec, precision)}

    def keeps_fp8(path: str) -> bool:
        return not trained and not load_in_4bit and path in quantizable

    def keeps_nf4(path: str) -> bool:
        return load_in_4bit and path in quantizable

    def quantizes(path: str) -> bool:
        return quantize and path in quantizable

    def checked(path: str, weight: Weight) -> Weight:
        # Computed on the device and looked at in the end: nothing waits for it.
        finite[path] = _is_finite([leaf for leaf in jax.tree.leaves(weight) if leaf.dtype != jnp.uint8])
        return weight

    def prepare(path: str, value: np.ndarray | NF4Tensor | FP8Tensor) -> Weight:
        dtype = precision.weight_dtype(path, trained=trained)
        if isinstance(value, FP8Tensor):
            return checked(path, FP8Weight.from_tensor(value))
        if isinstance(value, NF4Tensor):
            try:
                weight = NF4Weight.from_tensor(value)
            except ConvertError as error:
                raise ConvertError(f"{folder}: {path}: {error}") from None
            return checked(path, weight if keeps_nf4(path) else weight.dequantize(dtype))
        if quantizes(path):
            return _quantize(checked(path, jnp.asarray(value)))
        return checked(path, jnp.asarray(value).astype(dtype))

    kinds: list[set[Hashable]] = [{precision.layer_kind(config, index)} for index in range(config.num_hidden_layers)]
    for path, kind in formats.items():
        place = opened.specs[path].path
        if place.layer is not None:
            packed = kind == "fp8" and keeps_fp8(path)
            packed |= kind.startswith("nf4") and keeps_nf4(path)
            # Packed weights of one stack decode to one dtype.
            own = opened.decoded_dtype(path).name if packed or quantizes(path) else None
            kinds[place.layer].add((place.inside, kind if packed else "plain", own))
    plan = plan_layers([frozenset(kind) for kind in kinds], layer_loop)
    tree = _fill(config, plan, ((path, prepare(path, value)) for path, value in stream(folder, keeps_fp8)))
    for path, right in jax.device_get(finite).items():
        if not right and (quantizes(path) or not allow_nonfinite):
            raise _nonfinite(opened, path, precision.weight_dtype(path, trained=trained), quantizes(path))
    return plan, tree


def random_weights(
    config: ModelConfig, key: PRNGKeyArray, *, precision: Precision, trained: bool, load_in_4bit: bool, layer_loop: str
) -> tuple[tuple[LayerStack, ...], dict[str, Any]]:
    """Random weights, normal with the config's initializer_range, norms that scale by one, biases zero.

    Args:
        config: the model's.
        key: random state.
        precision: in which dtype each weight is held that is not quantised.
        trained: whether the weights are trained themselves.
        load_in_4bit: quantise the layers' matrices, but those of float32 modules, layer by layer.
        layer_loop: "scan" or "unroll".
    """

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return (jax.random.normal(key, shape, jnp.float32) * config.initializer_range).astype(dtype)

    def layer(index: int) -> Iterator[tuple[WeightPath, Weight]]:
        specs = config.layer_specs
        keys = jax.random.split(jax.random.fold_in(key, index + 2), len(specs))
        for spec, own in zip(specs, keys, strict=True):
            yield weight(spec._replace(path=spec.path.in_layer(index)), own)

    def weight(spec: WeightSpec, own: PRNGKeyArray) -> tuple[WeightPath, Weight]:
        dtype = precision.weight_dtype(spec.path, trained=trained)
        constant = {"zeros": 0.0, "ones": 1.0 - config.norm_offset}.get(spec.init)
        if constant is not None:
            return spec.path, jnp.full(spec.shape, constant, dtype)
        drawn = normal(own, spec.shape, dtype)
        return spec.path, _quantize(drawn) if load_in_4bit and _quantizable(spec, precision) else drawn

    def everything() -> Iterator[tuple[WeightPath, Weight]]:
        first, last = ([spec for spec in config.specs if spec.path.part == part] for part in (EMBEDDING, HEAD))
        between = [spec for spec in config.specs if spec.path.part == NORM]
        yield weight(first[0], jax.random.fold_in(key, 0))
        for index in range(config.num_hidden_layers):
            yield from layer(index)
        for spec in (*between, *last):
            yield weight(spec, jax.random.fold_in(key, 1))

    kinds = [precision.layer_kind(config, index) for index in range(config.num_hidden_layers)]
    plan = plan_layers(kinds, layer_loop)
    return plan, _fill(config, plan, everything())


def _quantizable(spec: WeightSpec, precision: Precision) -> bool:
    return spec.kind == "matrix" and spec.path.module not in precision.float32_modules


@jax.jit
def _is_finite(arrays: Sequence[Array]) -> Array:
    """Whether all values are finite. Maxima do not tell: XLA's own on a CPU pass NaN by."""
    return functools.reduce(jnp.logical_and, [jnp.isfinite(array.astype(jnp.float32)).all() for array in arrays])


def _nonfinite(opened: Weights, path: str, dtype: jnp.dtype, quantized: bool) -> ConvertError:
    name = opened.specs[path].name
    file = opened.checkpoint.info(name).file
    if quantized:
        return nonfinite(file, name, way_out=f"{NOT_IN_NF4} (float32_modules)")
    return nonfinite(file, name, where=f"where {dtype} cannot hold them")


@jax.jit
def _quantize(matrix: Array) -> NF4Weight:
    return NF4Weight.quantize(matrix)


def _fill(
    config: ModelConfig, plan: Sequence[LayerStack], arrays: Iterable[tuple[WeightPath, Weight]]
) -> dict[str, Any]:
    """Arrays as they come, in the order of the layers, put in their places of the tree."""
    tree: dict[str, Any] = {"layers": [[None] * run.period for run in plan]}
    pending: dict[str, Weight] = {}
    current: int | None = None
    for path, value in arrays:
        if current is not None and path.layer != current:
            _place(tree["layers"], plan, current, fuse_layer(pending, config))
            pending = {}
        current = path.layer
        if current is None:
            tree.setdefault(path.part, {})[path.leaf] = value
        else:
            pending[path.inside] = value
    if current is not None:
        _place(tree["layers"], plan, current, fuse_layer(pending, config))
    return tree


def _place(runs: list[list[Any]], plan: Sequence[LayerStack], index: int, layer: Any) -> None:
    number = next(n for n, run in enumerate(plan) if run.start <= index < run.start + run.period * run.count)
    run = plan[number]
    position, repeat = (index - run.start) % run.period, (index - run.start) // run.period
    if run.count == 1:
        runs[number][position] = layer
        return
    if runs[number][position] is None:
        runs[number][position] = jax.tree.map(lambda leaf: jnp.zeros((run.count, *leaf.shape), leaf.dtype), layer)
    runs[number][position] = _put(runs[number][position], layer, jnp.int32(repeat))


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacked: Any, layer: Any, repeat: Array) -> Any:
    return jax.tree.map(
        lambda whole, leaf: jax.lax.dynamic_update_index_in_dim(whole, leaf, repeat, axis=0), stacked, layer
    )
