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
from convert.formats.nf4 import NF4Tensor
from convert.weights import stream, stream_formats
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import part_rows
from fastjax.models.layout import GROUPS, NORMS, Run, fuse_layer, plan_layers
from fastjax.quantization import NF4Weight
from fastjax.quantization.weights import Weight


def load_weights(
    folder: str | Path, config: ModelConfig, *, dtype: jnp.dtype, load_in_4bit: bool, layer_loop: str
) -> tuple[tuple[Run, ...], dict[str, Any]]:
    """Read a Hugging Face folder into the tree that `Decoder` takes.

    Args:
        folder: safetensors files and config.json.
        config: the model's.
        dtype: of the weights that are not quantised.
        load_in_4bit: quantise the layers' matrices to NF4 with nested scales. In a folder that is quantised already the
            matrices keep their format (some may be in 16 bits there); without `load_in_4bit` they are dequantised.
        layer_loop: "scan" or "unroll".

    Returns:
        The arrangement of the layers, and the tree.

    Raises:
        ConvertError: what is wrong with the folder.
    """
    formats = stream_formats(folder)
    quantized = any(kind.startswith("nf4") for kind in formats.values())
    quantize = load_in_4bit and not quantized

    def prepare(path: str, value: np.ndarray | NF4Tensor) -> Weight:
        if isinstance(value, NF4Tensor):
            try:
                weight = NF4Weight.from_tensor(value)
            except ConvertError as error:
                raise ConvertError(f"{folder}: {path}: {error}") from None
            return weight if load_in_4bit else weight.dequantize(dtype)
        if quantize and _quantizable(path):
            return _quantize(jnp.asarray(value))
        return jnp.asarray(value).astype(dtype)

    kinds: list[set[Hashable]] = [set() for _ in range(config.num_hidden_layers)]
    for path, kind in formats.items():
        if path.startswith("layers."):
            _, index, rest = path.split(".", 2)
            kinds[int(index)].add((rest, kind if load_in_4bit and kind.startswith("nf4") else "plain"))
    plan = plan_layers([frozenset(kind) for kind in kinds], layer_loop)
    return plan, _fill(plan, ((path, prepare(path, value)) for path, value in stream(folder)))


def random_weights(
    config: ModelConfig, key: PRNGKeyArray, *, dtype: jnp.dtype, load_in_4bit: bool, layer_loop: str
) -> tuple[tuple[Run, ...], dict[str, Any]]:
    """Random weights, normal with the config's initializer_range, norms one, biases zero.

    Args:
        config: the model's.
        key: random state.
        dtype: of the weights that are not quantised.
        load_in_4bit: quantise the layers' matrices, layer by layer.
        layer_loop: "scan" or "unroll".
    """

    def normal(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        return (jax.random.normal(key, shape, jnp.float32) * config.initializer_range).astype(dtype)

    @jax.jit
    def layer(key: PRNGKeyArray) -> dict[str, Weight]:
        arrays: dict[str, Weight] = {f"{name}.weight": jnp.ones((config.hidden_size,), dtype) for name in NORMS}
        shapes = _shapes(config)
        for (path, shape), own in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
            if path.endswith(".bias"):
                arrays[path] = jnp.zeros(shape, dtype)
            else:
                matrix = normal(own, shape)
                arrays[path] = NF4Weight.quantize(matrix) if load_in_4bit else matrix
        return arrays

    def everything() -> Iterator[tuple[str, Weight]]:
        matrix = (config.vocab_size, config.hidden_size)
        yield "embed_tokens.weight", jax.jit(normal, static_argnums=1)(jax.random.fold_in(key, 0), matrix)
        for index in range(config.num_hidden_layers):
            for path, value in layer(jax.random.fold_in(key, index + 2)).items():
                yield f"layers.{index}.{path}", value
        yield "norm.weight", jnp.ones((config.hidden_size,), dtype)
        if not config.tie_word_embeddings:
            yield "lm_head.weight", jax.jit(normal, static_argnums=1)(jax.random.fold_in(key, 1), matrix)

    plan = plan_layers([()] * config.num_hidden_layers, layer_loop)
    return plan, _fill(plan, everything())


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's matrices and biases by their name in the layer."""
    inner = {"self_attn.o": config.num_attention_heads * config.head_dim, "mlp.down": config.intermediate_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for group, rows in part_rows(config).items():
        block = group.split(".")[0]
        biased = config.attention_bias if block == "self_attn" else config.mlp_bias
        for part, out in zip(GROUPS[group], rows, strict=True):
            shapes[f"{block}.{part}.weight"] = (out, inner.get(group, config.hidden_size))
            if biased:
                shapes[f"{block}.{part}.bias"] = (out,)
    return shapes


def _quantizable(path: str) -> bool:
    return path.startswith("layers.") and path.endswith("_proj.weight")


@jax.jit
def _quantize(matrix: Array) -> NF4Weight:
    return NF4Weight.quantize(matrix)


def _fill(plan: Sequence[Run], arrays: Iterable[tuple[str, Weight]]) -> dict[str, Any]:
    """Arrays as they come, in the order of the layers, put in their places of the tree."""
    tree: dict[str, Any] = {"layers": [[None] * run.period for run in plan]}
    pending: dict[str, Weight] = {}
    current: int | None = None
    for path, value in arrays:
        index = int(path.split(".")[1]) if path.startswith("layers.") else None
        if current is not None and index != current:
            _place(tree["layers"], plan, current, fuse_layer(pending))
            pending = {}
        current = index
        if index is None:
            name, kind = path.rsplit(".", 1)
            tree.setdefault(name, {})[kind] = value
        else:
            pending[path.split(".", 2)[2]] = value
    if current is not None:
        _place(tree["layers"], plan, current, fuse_layer(pending))
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
