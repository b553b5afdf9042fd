"""The places of the layers' arrays in memory: stacks and single layers, on the device or in the host's memory.

Each layer is copied to its place as it comes, so that the device never holds the stacks that lie in the host. On a mesh
each device gets its parts: one of them holds a layer beside its own, and its tensors while they are joined to it.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from convert.model.config import ModelConfig
from convert.model.paths import WeightPath
from fastjax.buffers import zeros
from fastjax.execution.stacks import located
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
        trained: as for `Places`.
        offload_layers: as for `Places`.
        mesh: as for `Places`.
    """
    places = Places(config, plan, trained=trained, offload_layers=offload_layers, mesh=mesh)
    tree: dict[str, Any] = {}
    pending: dict[str, WeightLike] = {}
    current: int | None = None

    def fused(index: int) -> Any:
        nonlocal pending
        tensors, pending = pending, {}  # nothing holds them once they are joined
        return fuse_layer(tensors, config, index)

    for path, value in arrays:
        if current is not None and path.layer != current:
            places.put(current, fused(current))
        current = path.layer
        if current is None:
            table = {path.part: {path.leaf: value}}
            tree.setdefault(path.part, {}).update(places.spread(table)[path.part])
        else:
            pending[path.inside] = value
    if current is not None:
        places.put(current, fused(current))
    return {"layers": places.stacks, **tree}


class Places:
    """The places of a decoder's layers.

    Attributes:
        config: the model's.
        plan: arrangement of the layers.
        trained: whether they are trained: then the tree is the same on every mesh, as a run's state is.
        offload_layers: place the matrices of stacked layers in the host's memory.
        mesh: of the devices that get parts of the arrays; None: the arrays stay on their device.
        stacks: the trees of the layers that have come, by stack and by position in its period.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Sequence[LayerStack],
        *,
        trained: bool = False,
        offload_layers: bool = False,
        mesh: Mesh | None = None,
    ):
        self.config, self.plan, self.trained = config, plan, trained
        self.offload_layers, self.mesh = offload_layers, mesh
        self.stacks: list[list[Any]] = [[None] * stack.period for stack in plan]

    def spread(self, tree: Any) -> Any:
        """Arrays of a decoder's tree in their parts on the mesh, if there is one."""
        if self.mesh is None:
            return tree
        tree = tree if self.trained else held_apart(tree, self.config, self.mesh.shape[TENSOR])
        return place(tree, shard_frozen(tree, logical_axes(tree, self.config), self.mesh))

    def put(self, index: int, layer: Any) -> None:
        """Copy a layer to its place.

        Args:
            index: of the layer.
            layer: its tree.
        """
        layer = self.spread({"layers": {0: {0: layer}}})["layers"][0][0]
        number, position, repeat = located(self.plan, index)
        stack, stacked = self.stacks[number], self.plan[number].count > 1
        if stack[position] is None:
            self._allocate(index, layer)
            # With the first of single layers the places of all of its kind: an array made among a layer's temporary
            # ones would come to lie in a hole that these leave, up to twice its size, and hold all of it.
            for other in () if stacked else range(index + 1, self.config.num_hidden_layers):
                run, where, _ = located(self.plan, other)
                alike = self.config.layers[other] == self.config.layers[index]
                if alike and self.plan[run].count == 1 and self.stacks[run][where] is None:
                    self._allocate(other, layer)
        elif not stacked and signature(stack[position]) != signature(layer):  # in another format than the first
            stack[position] = None
            self._allocate(index, layer)
        stack[position] = _put(stack[position], layer, np.int32(repeat) if stacked else None)

    def _allocate(self, index: int, layer: Any) -> None:
        number, position, _ = located(self.plan, index)
        count = self.plan[number].count

        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = leaf.shape if count == 1 else (count, *leaf.shape)
            before = (None,) * (len(shape) - leaf.ndim)
            where = None if self.mesh is None else NamedSharding(self.mesh, P(*before, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

        leaves, structure = jax.tree.flatten(jax.tree.map(place, layer))
        near = zeros([None if self.offload_layers and is_streamed(leaf, count) else leaf for leaf in leaves])
        self.stacks[number][position] = structure.unflatten(
            zeros_in_host_memory(leaf.shape, leaf.dtype) if array is None else array
            for leaf, array in zip(leaves, near, strict=True)
        )


@functools.partial(jax.jit, donate_argnums=0)
def _put(places: Any, layer: Any, repeat: np.int32 | None) -> Any:
    """A layer's arrays in the memory of `places`; of stacks, at the place of period `repeat`."""

    def put(place: Array, leaf: Array) -> Array:
        if in_host_memory(place):
            leaf = jax.device_put(leaf, jax.memory.Space.Host)
        start = (0,) * leaf.ndim if repeat is None else (repeat, *(0,) * leaf.ndim)
        return jax.lax.dynamic_update_slice(place, leaf if repeat is None else leaf[None], start)

    return jax.tree.map(put, places, layer)
