"""The places of the layers' arrays in memory: stacks and single layers, on the device or in the host's memory.

Each layer is copied to its place as it comes, so that the device never holds the stacks that lie in the host. On a mesh
each device gets its parts: one of them holds a layer beside its own, and its tensors while they are joined to it.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from convert.model.config import ModelConfig
from convert.model.paths import WeightPath
from fastjax.execution.streamed import is_streamed
from fastjax.execution.tensor_parts import held_apart
from fastjax.host_memory import in_host_memory, zeros_in_host_memory
from fastjax.models.layout import LayerStack, fuse_layer, logical_axes, signature
from fastjax.parallel import TENSOR, place, shard_frozen
from fastjax.quantization import WeightLike


def fill_tree(
    config: ModelConfig,
    plan: Sequence[LayerStack],
    arrays: Iterable[tuple[WeightPath, WeightLike]],
    *,
    trained: bool = False,
    offload_layers: bool = False,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Arrays as they come, put in their places of the tree.

    Args:
        config: the model's.
        plan: arrangement of the layers.
        arrays: by path, a layer's beside each other and the layers in their order.
        trained: whether they are trained: then the tree is the same on every mesh, as a run's state is.
        offload_layers: place the matrices of stacked layers in the host's memory.
        mesh: of the devices that get parts of the arrays; None: the arrays stay on their device.
    """
    tree: dict[str, Any] = {}

    def layers() -> Iterator[Any]:
        pending: dict[str, WeightLike] = {}
        current: int | None = None

        def fused(index: int) -> Any:
            nonlocal pending
            parts, pending = pending, {}  # nothing holds them once they are joined
            return fuse_layer(parts, config, index)

        for path, value in arrays:
            if current is not None and path.layer != current:
                yield fused(current)
            current = path.layer
            if current is None:
                table = {path.part: {path.leaf: value}}
                tree.setdefault(path.part, {}).update(_spread(table, config, mesh, trained)[path.part])
            else:
                pending[path.inside] = value
        if current is not None:
            yield fused(current)

    where: Any = {"trained": trained, "offload_layers": offload_layers, "mesh": mesh}
    return {"layers": fill_layers(config, plan, layers(), **where), **tree}


def fill_layers(
    config: ModelConfig,
    plan: Sequence[LayerStack],
    layers: Iterable[Any],
    *,
    offload_layers: bool,
    trained: bool = False,
    mesh: Mesh | None = None,
) -> list[list[Any]]:
    """Layers as they come, put in their places of the runs.

    Args:
        config: the model's.
        plan: arrangement of the layers.
        layers: trees of single layers, in their order.
        offload_layers: as for `fill_tree`.
        trained: as for `fill_tree`.
        mesh: as for `fill_tree`.
    """
    runs: list[list[Any]] = [[None] * run.period for run in plan]
    index = 0
    for layer in layers:
        _place(runs, config, plan, index, layer, offload_layers, mesh, trained)
        del layer  # not while the next one is read, nor in a tuple of `enumerate`
        index += 1
    return runs


def _spread(tree: Any, config: ModelConfig, mesh: Mesh | None, trained: bool) -> Any:
    """Arrays of a decoder's tree in their parts on the mesh, if there is one."""
    if mesh is None:
        return tree
    tree = tree if trained else held_apart(tree, config, mesh.shape[TENSOR])
    return place(tree, shard_frozen(tree, logical_axes(tree, config), mesh))


def _place(
    runs: list[list[Any]],
    config: ModelConfig,
    plan: Sequence[LayerStack],
    index: int,
    layer: Any,
    offload_layers: bool,
    mesh: Mesh | None,
    trained: bool,
) -> None:
    """Copy a layer to its place.

    The places of single layers of a kind are allocated with the first of them: an array made among a layer's temporary
    ones would come to lie in a hole that these leave, up to twice its size, and hold all of it.
    """

    def allocate(index: int) -> None:
        number, position, _ = _place_of(plan, index)
        count = plan[number].count

        def zeros(leaf: Any) -> Array:
            shape = leaf.shape if count == 1 else (count, *leaf.shape)
            if offload_layers and is_streamed(jax.ShapeDtypeStruct(shape, leaf.dtype), count):
                return zeros_in_host_memory(shape, leaf.dtype)
            before = (None,) * (len(shape) - leaf.ndim)
            where = None if mesh is None else NamedSharding(mesh, P(*before, *leaf.sharding.spec))
            return jnp.zeros(shape, leaf.dtype, device=where)

        runs[number][position] = jax.tree.map(zeros, layer)

    layer = _spread({"layers": {0: {0: layer}}}, config, mesh, trained)["layers"][0][0]
    number, position, repeat = _place_of(plan, index)
    stacked = plan[number].count > 1
    if runs[number][position] is None:
        allocate(index)
        alike = (n for n in range(index + 1, config.num_hidden_layers) if config.layers[n] == config.layers[index])
        for other, (run, where, _) in ((n, _place_of(plan, n)) for n in alike if not stacked):
            if plan[run].count == 1 and runs[run][where] is None:
                allocate(other)
    if not stacked and signature(runs[number][position]) != signature(layer):  # held in another format than the first
        runs[number][position] = None
        allocate(index)
    runs[number][position] = _put(runs[number][position], layer, np.int32(repeat) if stacked else None)


def _place_of(plan: Sequence[LayerStack], index: int) -> tuple[int, int, int]:
    """A layer's run, its position in the period, and the number of the period."""
    number = next(n for n, run in enumerate(plan) if run.start <= index < run.start + run.period * run.count)
    offset = index - plan[number].start
    return number, offset % plan[number].period, offset // plan[number].period


@functools.partial(jax.jit, donate_argnums=0)
def _put(places: Any, layer: Any, repeat: np.int32 | None) -> Any:
    """A layer's arrays in the memory of `places`; of stacks, at the place of period `repeat`."""

    def put(place: Array, leaf: Array) -> Array:
        if in_host_memory(place):
            leaf = jax.device_put(leaf, jax.memory.Space.Host)
        start = (0,) * leaf.ndim if repeat is None else (repeat, *(0,) * leaf.ndim)
        return jax.lax.dynamic_update_slice(place, leaf if repeat is None else leaf[None], start)

    return jax.tree.map(put, places, layer)
