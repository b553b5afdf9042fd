"""How the layers lie in memory: which projections share a weight, which layers share a stack.

On disk every projection is a tensor of its own ("layers.3.self_attn.q_proj.weight"). In memory the projections that
read the same input are one weight of several parts, and runs of layers with equal structure may be stacked along a
leading axis, so that one traced body serves them all.
"""

import functools
import math
import operator
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from convert.model.config import ModelConfig
from convert.model.paths import WeightPath
from fastjax.models.leaves import LORA_A, LORA_B, START, leaf_at
from fastjax.parallel import as_input
from fastjax.quantization import Weight, WeightLike, as_weight, concatenate, rows_of

#: Elements of an adapter's matrix from which on it is split; smaller ones are replicated.
MIN_ADAPTER = 1 << 20


class LayerStack(NamedTuple):
    """Layers start … start + period·count - 1, `period` different ones repeated `count` times (stacked if > 1)."""

    start: int
    period: int
    count: int


def fuse_layer(arrays: Mapping[str, WeightLike], config: ModelConfig, index: int) -> dict[str, Any]:
    """The tree of one layer from its tensors.

    Args:
        arrays: paths inside the layer ("self_attn.q_proj.weight") to arrays or NF4 weights.
        config: the model's.
        index: the layer's number.
    """
    layer: dict[str, Any] = {}

    def put(path: WeightPath, value: WeightLike) -> None:
        *above, last = path.keys
        tree = layer
        for key in above:
            tree = tree.setdefault(key, {})
        tree[last] = value

    for path in _alone(config, index):
        put(path, arrays[path])
    for group in config.groups(index).values():
        put(group.path, concatenate([arrays[WeightPath(None, group.block, part)] for part, _ in group.parts]))
        if group.bias:
            plain = [jnp.asarray(arrays[WeightPath(None, group.block, part, "bias")]) for part, _ in group.parts]
            dtype = plain[0].dtype if len({b.dtype for b in plain}) == 1 else jnp.float32
            put(group.path.with_leaf("bias"), jnp.concatenate([b.astype(dtype) for b in plain], axis=-1))
    return layer


def split_layer(layer: Mapping[str, Any], config: ModelConfig, index: int) -> dict[WeightPath, Array]:
    """The plain tensors of one layer, the way back from `fuse_layer`.

    Args:
        layer: tree of one layer with arrays for weights.
        config: the model's.
        index: the layer's number.
    """
    arrays = {path: array_at(layer, path) for path in _alone(config, index)}
    for group in config.groups(index).values():
        for part, _ in group.parts:
            here = group.part_rows(part)
            arrays[WeightPath(None, group.block, part)] = rows_of(array_at(layer, group.path), here)
            if group.bias:
                bias = array_at(layer, group.path.with_leaf("bias"))
                arrays[WeightPath(None, group.block, part, "bias")] = bias[..., here]
    return arrays


def array_at(layer: Mapping[str, Any], path: WeightPath) -> Any:
    """The array of a layer's tree at a path.

    Args:
        layer: tree of one layer.
        path: inside the layer.
    """
    return functools.reduce(operator.getitem, path.keys, layer)


def _alone(config: ModelConfig, index: int) -> list[WeightPath]:
    """The arrays that share no weight: normalisations, routers, sinks."""
    return [spec.path for spec in config.layer_specs(index) if spec.group is None]


def logical_axes(tree: Any, config: ModelConfig) -> Any:
    """The logical axes of a decoder's arrays: a PartitionSpec of names a leaf, of None for vectors and routers.

    Args:
        tree: the frozen tree or the trained one, of arrays or shapes.
        config: the model's.
    """
    matrices: dict[tuple[str, ...], tuple[str, ...]] = {
        (spec.path.part, spec.path.leaf): spec.axes for spec in config.specs if spec.kind == "table"
    }
    for index in range(config.num_hidden_layers):
        for name, group in config.groups(index).items():
            members = (spec for spec in config.layer_specs(index) if spec.group == name and spec.path.leaf == "weight")
            matrices[group.path.keys] = next(members).axes

    def of(path: tuple[Any, ...], weight: Any) -> Any:
        keys = tuple(key.key for key in path)
        keys = keys[keys[0] == START :]
        names = matrices.get(keys[3:] if keys[0] == "layers" else keys)  # after stack and position
        if names is None:
            return jax.tree.map(lambda leaf: _alone_axes(path, leaf), weight)
        *leading, out, into = names
        axes = as_weight(weight).axes(out, as_input(into))

        def stacked(leaf: Any, names: P) -> P:
            before = ("layer",) * (leaf.ndim - len(leading) - len(names))
            return P(*before, *leading, *names)

        return jax.tree.map(stacked, weight, axes)

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=lambda leaf: isinstance(leaf, Weight))


def _alone_axes(path: tuple[Any, ...], array: Any) -> P:
    """The logical axes of what is no matrix of the model: adapters, vectors, routers."""
    if array.ndim == 0:
        return P()
    leaf = leaf_at(path)
    matrix = leaf.kind in LORA_A | LORA_B
    inner = 2 if matrix else 1
    experts = ("expert",) if leaf.of_experts and array.ndim > inner else ()
    rows = "adapter" if matrix and math.prod(array.shape[-2:]) >= MIN_ADAPTER else None
    return P(*[None] * (array.ndim - inner - len(experts)), *experts, rows, *[None] * (inner - 1))


def signature(layer: Any) -> Hashable:
    """Tree structure, shapes and dtypes of a layer; layers of one stack have equal ones."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
