"""From a stream of named arrays to the decoder's tree: fused, quantised and stacked, one layer at a time.

Host memory stays at what the stream holds, device memory at the finished tree plus one layer.
"""

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
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
from convert.model.structure import shapes
from convert.weights import Weights, stream
from fastjax.models.layout import Run, fuse_layer, plan_layers
from fastjax.models.precision import Precision
from fastjax.models.vocabulary import TABLES
from fastjax.quantization import FP8Weight, NF4Weight
from fastjax.quantization.weights import Weight


def load_weights(
    opened: Weights,
    config: ModelConfig,
    *,
    precision: Precision,
    trained: bool,
    load_in_4bit: bool,
    layer_loop: str,
    allow_nonfinite: bool = False,
) -> tuple[tuple[Run, ...], dict[str, Any]]:
    """Read an open Hugging Face folder into the tree that `Decoder` takes.

    Args:
        opened: the folder's weights.
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
    formats = {path: opened.format(path) for path in opened.rows}
    quantized = any(kind.startswith("nf4") for kind in formats.values())
    quantize = load_in_4bit and not quantized

    def keeps_fp8(path: str) -> bool:
        return not trained and not load_in_4bit and _quantizable(path, precision)

    def keeps_nf4(path: str) -> bool:
        return load_in_4bit and _quantizable(path, precision)

    def quantizes(path: str) -> bool:
        return quantize and _quantizable(path, precision)

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
                raise ConvertError(f"{opened.checkpoint.folder}: {path}: {error}") from None
            return checked(path, weight if keeps_nf4(path) else weight.dequantize(dtype))
        if quantizes(path):
            return _quantize(checked(path, jnp.asarray(value)))
        return checked(path, jnp.asarray(value).astype(dtype))

    kinds: list[set[Hashable]] = [{precision.layer_kind(config, index)} for index in range(config.num_hidden_layers)]
    for path, kind in formats.items():
        if path.startswith("layers."):
            _, index, rest = path.split(".", 2)
            packed = kind == "fp8" and keeps_fp8(path)
            packed |= kind.startswith("nf4") and keeps_nf4(path)
            # Packed weights of one stack decode to one dtype.
            own = opened.decoded_dtype(path).name if packed or quantizes(path) else None
            kinds[int(index)].add((rest, kind if packed else "plain", own))
    plan = plan_layers([frozenset(kind) for kind in kinds], layer_loop)
    tree = _fill(config, plan, ((path, prepare(path, value)) for path, value in stream(opened, keeps_fp8)))
    for path, right in jax.device_get(finite).items():
        if not right and (quantizes(path) or not allow_nonfinite):
            raise _nonfinite(opened, path, precision.weight_dtype(path, trained=trained), quantizes(path))
    return plan, tree


def random_weights(
    config: ModelConfig, key: PRNGKeyArray, *, precision: Precision, trained: bool, load_in_4bit: bool, layer_loop: str
) -> tuple[tuple[Run, ...], dict[str, Any]]:
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

    def layer(index: int) -> dict[str, Weight]:
        arrays: dict[str, Weight] = {}
        named = shapes(config)
        keys = jax.random.split(jax.random.fold_in(key, index + 2), len(named))
        for (name, shape), own in zip(named.items(), keys, strict=True):
            path = f"layers.{index}.{name}"
            dtype = precision.weight_dtype(path, trained=trained)
            if not name.endswith("_proj.weight"):
                arrays[name] = jnp.full(shape, 0.0 if name.endswith(".bias") else 1.0 - config.norm_offset, dtype)
            elif load_in_4bit and _quantizable(path, precision):
                arrays[name] = _quantize(normal(own, shape, dtype))
            else:
                arrays[name] = normal(own, shape, dtype)
        return arrays

    def everything() -> Iterator[tuple[str, Weight]]:
        matrix = (config.vocab_size, config.hidden_size)
        dtypes = {name: precision.weight_dtype(f"{name}.weight", trained=trained) for name in (*TABLES, "norm")}
        yield "embed_tokens.weight", normal(jax.random.fold_in(key, 0), matrix, dtypes["embed_tokens"])
        for index in range(config.num_hidden_layers):
            for name, value in layer(index).items():
                yield f"layers.{index}.{name}", value
        yield "norm.weight", jnp.full((config.hidden_size,), 1.0 - config.norm_offset, dtypes["norm"])
        if not config.tie_word_embeddings:
            yield "lm_head.weight", normal(jax.random.fold_in(key, 1), matrix, dtypes["lm_head"])

    kinds = [precision.layer_kind(config, index) for index in range(config.num_hidden_layers)]
    plan = plan_layers(kinds, layer_loop)
    return plan, _fill(config, plan, everything())


def _quantizable(path: str, precision: Precision) -> bool:
    held = path.rpartition(".")[0] in precision.float32_modules
    return path.startswith("layers.") and path.endswith("_proj.weight") and not held


@jax.jit
def _is_finite(arrays: Sequence[Array]) -> Array:
    """Whether all values are finite. Maxima do not tell: XLA's own on a CPU pass NaN by."""
    return functools.reduce(jnp.logical_and, [jnp.isfinite(array.astype(jnp.float32)).all() for array in arrays])


def _nonfinite(opened: Weights, path: str, dtype: jnp.dtype, quantized: bool) -> ConvertError:
    name = opened.rows[path].name
    file = opened.checkpoint.info(name).file
    if quantized:
        return nonfinite(file, name, way_out=f"{NOT_IN_NF4} (float32_modules)")
    return nonfinite(file, name, where=f"where {dtype} cannot hold them")


@jax.jit
def _quantize(matrix: Array) -> NF4Weight:
    return NF4Weight.quantize(matrix)


def _fill(config: ModelConfig, plan: Sequence[Run], arrays: Iterable[tuple[str, Weight]]) -> dict[str, Any]:
    """Arrays as they come, in the order of the layers, put in their places of the tree."""
    tree: dict[str, Any] = {"layers": [[None] * run.period for run in plan]}
    pending: dict[str, Weight] = {}
    current: int | None = None
    for path, value in arrays:
        index = int(path.split(".")[1]) if path.startswith("layers.") else None
        if current is not None and index != current:
            _place(tree["layers"], plan, current, fuse_layer(pending, config))
            pending = {}
        current = index
        if index is None:
            name, kind = path.rsplit(".", 1)
            tree.setdefault(name, {})[kind] = value
        else:
            pending[path.split(".", 2)[2]] = value
    if current is not None:
        _place(tree["layers"], plan, current, fuse_layer(pending, config))
    return tree


def _place(runs: list[list[Any]], plan: Sequence[Run], index: int, layer: Any) -> None:
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
