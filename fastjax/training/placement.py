"""Where the state of a step lives on a mesh.

A trained array lies where its logical axes say (`parallel.MESH_AXES`), and with it what the optimizer holds of it:
`fsdp` splits weights, gradients and moments (ZeRO, Rajbhandari et al., arXiv 1910.02054). What a replica's exchange of
gradients rounds off is its own. Counters, rates and random state are on every device.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING
from fastjax.models.layout import logical_axes
from fastjax.parallel import BATCH, MeshShape, place, shard_frozen
from fastjax.parallel.gather import is_split
from fastjax.parallel.islands import on_axes
from fastjax.training.optimizers.adafactor import Factored
from fastjax.training.optimizers.blockwise import Blockwise
from fastjax.training.optimizers.stacked_layers import StackedLayers

#: What an optimizer holds of an array in another shape than the array's.
_PARTS = (Blockwise, Factored)


class _ShardedShape(NamedTuple):
    """The shape of an array that the optimizer sees, and where it lies."""

    shape: tuple[int, ...]
    place: NamedSharding


def _stack(arrays: Sequence[_ShardedShape]) -> _ShardedShape:
    shape, place = arrays[0]
    return _ShardedShape((len(arrays), *shape), NamedSharding(place.mesh, P(None, *place.spec)))


def state_shardings(state: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of a train state.

    Args:
        state: a `TrainState`, of arrays or shapes; or the trained arrays alone.
        config: the model's.
        mesh: the mesh.
    """
    whole = NamedSharding(mesh, P())
    if not hasattr(state, "trainable"):
        return weight_shardings(state, config, mesh)
    trained = weight_shardings(state.trainable, config, mesh)
    arrays = jax.tree.map(lambda leaf, place: _ShardedShape(leaf.shape, place), state.trainable, trained)
    stacks = StackedLayers(state.trainable).stacked(arrays, _stack)
    paths = jax.tree_util.tree_flatten_with_path(stacks, is_leaf=lambda node: isinstance(node, _ShardedShape))[0]
    places = {_names(path): placed for path, placed in paths}

    def sharding_of(path: tuple[Any, ...], moment: Any) -> Any:
        array = places.get(_names(path))
        if array is None:
            return whole
        shape, place = array
        if isinstance(moment, _PARTS):
            return jax.tree.map(lambda spec: NamedSharding(mesh, spec), moment.specs(place.spec, mesh))
        return place if moment.shape == shape else whole

    def is_moment(moment: Any) -> bool:
        return isinstance(moment, _PARTS)

    moments = jax.tree_util.tree_map_with_path(sharding_of, state.opt_state, is_leaf=is_moment)
    replicas = NamedSharding(mesh, P(on_axes(BATCH, mesh)))
    feedback = jax.tree.map(lambda _: replicas, state.feedback)
    replicated = jax.tree.map(lambda _: whole, state)
    return replicated._replace(trainable=trained, opt_state=moments, feedback=feedback)


def weight_shardings(tree: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of a decoder's arrays.

    Args:
        tree: the frozen tree or the trained one, of arrays or shapes.
        config: the model's.
        mesh: the mesh.
    """
    return shard_frozen(tree, logical_axes(tree, config), mesh)


def sums_apart(trainable: Any, frozen: Any, config: ModelConfig, mesh: Mesh | None) -> Iterator[str]:
    """Why a mesh's devices cannot take gradients of their own rows alone and sum them once, behind the backward pass.

    Args:
        trainable: the trained tree, of arrays or shapes.
        frozen: the others.
        config: the model's.
        mesh: the mesh; None: one device.

    Yields:
        Clauses for behind "expected False": none where they can.
    """
    shape = MeshShape() if mesh is None else MeshShape(**mesh.shape)
    if shape.data * shape.fsdp == 1:
        yield "on one device"
    if shape.size > shape.data * shape.fsdp:
        yield f"on {shape}, where parallel.expert, context or tensor is above 1"
    if config.moe is not None:
        yield "with a mixture of experts, whose routers' losses are of the whole batch"
    if mesh is None or shape.fsdp == 1:
        return
    if any("fsdp" in axes for axes in _mesh_axes(trainable, config, mesh)):
        yield "where trained arrays are split over parallel.fsdp"
    axes = jax.tree.leaves(logical_axes(frozen, config), is_leaf=lambda node: isinstance(node, P))
    split = ("fsdp" in found for found in _mesh_axes(frozen, config, mesh))
    if any(is_split(names) and not there for names, there in zip(axes, split, strict=True)):
        yield "where frozen matrices do not divide over parallel.fsdp"
    if "adapter" in trainable.get(EMBEDDING, {}):
        yield "where the embeddings have an adapter, with parallel.fsdp above 1"


def _mesh_axes(tree: Any, config: ModelConfig, mesh: Mesh) -> Iterator[set[str]]:
    """The mesh axes over which each array is split."""
    for sharding in jax.tree.leaves(weight_shardings(tree, config, mesh)):
        entries = [(entry,) if isinstance(entry, str) else entry for entry in sharding.spec if entry is not None]
        yield {axis for axes in entries for axis in axes}


def start_on_mesh(begin: Callable[[Any], Any], trainable: Any, frozen: Any, batch: Any, step: Any) -> tuple[Any, Any]:
    """The state before the first step and the frozen weights, each array made or put in its parts on the mesh.

    Args:
        begin: trained arrays -> the state (`training.step.init_state`).
        trainable: their initial values.
        frozen: the other arrays.
        batch: arrays, or their shapes.
        step: of `training.step.make_train_step`, on the mesh.
    """
    state, weights, _ = step.shardings(jax.eval_shape(begin, trainable), frozen, batch)
    return jax.jit(begin, out_shardings=state)(place(trainable, state.trainable)), place(frozen, weights)


def _names(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The keys of a path from its first dictionary on: in an optimizer's state those of the trained array."""
    first = next((n for n, entry in enumerate(path) if isinstance(entry, jax.tree_util.DictKey)), len(path))
    return tuple(getattr(entry, "key", entry) for entry in path[first:])
