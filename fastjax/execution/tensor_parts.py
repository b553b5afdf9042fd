"""Layers whose heads and features lie on several devices (Megatron-LM, arXiv 1909.08053).

Of the projections that read a layer's input, each device has some output rows: its own query heads, the key heads that
these read, its own features of gate and up. Of the projections back it has the input columns that belong to these, and
their products are summed (`parallel.tokens`). So all that lies between is a device's own. The layers run in one island,
as modules of a smaller model: heads, parts and weights are a device's part.

A weight of several parts is held as one weight a part (`held_apart`), each split by its own rows; an adapter's A or B
is split as its weight is, and the other is whole. Each device reads a copy of its own of what is the same on several
(`copied`): so their gradients are summed once, behind the loop over the layers, and not beside each layer's products.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from convert.model.config import ModelConfig
from fastjax.errors import ConfigError
from fastjax.lora.units import Tokens, row_slices
from fastjax.models.context import Context
from fastjax.models.layout import MIN_ADAPTER
from fastjax.models.mixers.attention import Attention
from fastjax.models.projection import Projection
from fastjax.parallel import BATCH, CONTEXT, TENSOR, all_tokens, devices_along, local, own_sums, rows_split, split_axis
from fastjax.parallel.islands import on_axes
from fastjax.parallel.mesh import MESH_AXES, as_input
from fastjax.quantization import MixedWeight, Weight, WeightLike, as_weight, concatenate, rows_of

_ADAPTER = ("lora_A", "lora_B")


@dataclasses.dataclass(frozen=True)
class TensorTokens(Tokens):
    """The tokens of one of several devices that share layers.

    Attributes:
        split: the axis over which tokens lie on them (`parallel.split_axis`).
    """

    split: int
    shared = True

    def all_of(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """The tokens of all devices along `tensor`."""
        return all_tokens(x, self.split)

    def own_sums(self, x: Float[Array, "B S E"], travel: DTypeLike | None = None) -> Float[Array, "B S E"]:
        """Sums over the devices along `tensor`, of this one's tokens."""
        return own_sums(x, self.split, travel=travel)


class TensorAxes(NamedTuple):
    """The groups of projections that devices along `tensor` split, as keys in a layer's tree.

    Attributes:
        by_rows: those of which a device has output rows.
        by_columns: those of which it has input columns.
    """

    by_rows: frozenset[tuple[str, ...]]
    by_columns: frozenset[tuple[str, ...]]


@functools.cache
def tensor_axes(config: ModelConfig) -> TensorAxes:
    """As their weights' logical axes lie on the mesh."""
    rows, columns = set(), set()
    for index in {layer: index for index, layer in enumerate(config.layers)}.values():
        groups = config.groups(index)
        for spec in config.layer_specs(index):
            if spec.group is not None and spec.path.leaf == "weight":
                *_, out, into = spec.axes
                keys = groups[spec.group].path.module.keys
                rows |= {keys} if TENSOR in MESH_AXES[out] else set()
                columns |= {keys} if TENSOR in MESH_AXES[as_input(into)] else set()
    return TensorAxes(frozenset(rows), frozenset(columns))


def held_apart(frozen: Any, config: ModelConfig, devices: int) -> Any:
    """The frozen tree with weights that split over devices along `tensor`; itself where there is one, or they do.

    Args:
        frozen: of the decoder.
        config: the model's.
        devices: along `tensor`.

    Raises:
        ConfigError: a weight whose blocks do not divide, or whose format does not split.
    """
    if devices == 1:
        return frozen
    groups, axes = config.groups(0), tensor_axes(config)

    def of(keys: tuple[Any, ...], weight: Any) -> Any:
        group = keys[3:5]  # after stack and position
        if keys[0] != "layers" or keys[-1] != "weight" or group not in axes.by_rows | axes.by_columns:
            return weight
        name = ".".join(group)
        _, columns = as_weight(weight).shape
        if group in axes.by_columns and columns % devices:
            raise ConfigError(f"parallel.tensor: expected a divisor of the {columns} columns of {name}, got {devices}")
        sizes = tuple(rows for _, rows in groups[name].parts)
        return _apart(weight, sizes, devices if group in axes.by_columns else 1)

    return _by_keys(of, frozen)


def copied(arrays: Any, axes: TensorAxes, *, stacked: bool) -> Any:
    """Layers' arrays with a copy of each adapter for every device that has the same one; those that `fsdp` splits stay.

    Args:
        arrays: of the layers of one period, by position.
        axes: of the model.
        stacked: whether they lead with an axis over layers, which the copies' axis then follows.
    """
    lead = int(stacked)

    def of(keys: tuple[Any, ...], leaf: Any) -> Any:
        if keys[-1] not in _ADAPTER or math.prod(leaf.shape[lead:]) >= MIN_ADAPTER:
            return leaf
        places = _adapter_axes(keys, axes)
        shape = (*leaf.shape[:lead], _count(places[0]), *leaf.shape[lead:])
        copies = jnp.broadcast_to(jnp.expand_dims(leaf, lead), shape)
        return lax.with_sharding_constraint(copies, P(*[None] * lead, *places))

    return _by_keys(of, arrays)


def layers_on_parts(
    run: Callable[..., Any],
    layers: nnx.List,
    axes: TensorAxes,
    x: Float[Array, "B S E"],
    shared: Context,
    *rest: Any,
) -> Any:
    """`run(layers, x, shared, *rest)` in an island, each device with its part of the layers.

    Args:
        run: of the layers, their input and what all layers read; gives their output, and the routers' sums.
        layers: whole, with adapters as `copied` makes them.
        axes: of the model.
        x: the input.
        shared: that all layers read.
        rest: more arguments, the same on all devices.
    """
    split = split_axis(x.shape[0])
    for projection, sizes, columns in _cuts(layers):
        projection.weight.set_value(_apart(projection.weight.get_value(), sizes, columns))
    graphdef, variables = nnx.split(layers)
    state = nnx.to_pure_dict(variables)

    def on_device(x: Array, state: Any, shared: Context, *rest: Any) -> Any:
        return own_part(run, nnx.merge(graphdef, state), split, x, shared, *rest)

    rows, specs, context = part_specs(state, axes, x.shape[0], stacked=False)
    in_specs = (rows, specs, context, *[P()] * len(rest))
    return local(on_device, in_specs=in_specs, out_specs=(rows, P()))(x, state, shared, *rest)


def are_apart(layers: nnx.List) -> bool:
    """Whether the weights of layers lie as devices along `tensor` split them: those that are frozen do.

    Args:
        layers: of a stack or not.
    """
    return all(_is_apart(projection.weight.get_value(), sizes, columns) for projection, sizes, columns in _cuts(layers))


def _cuts(layers: nnx.List) -> Iterator[tuple[Projection, tuple[int, ...], int]]:
    """The projections of layers with the rows of their parts, and the parts into which columns are to be split."""
    for layer in layers:
        inner = (*layer.mixer.inner, *layer.mlp.inner)
        for projection in (*inner, *layer.mixer.outer, *layer.mlp.outer):
            columns = 1 if projection in inner else devices_along(TENSOR)
            yield projection, tuple(rows for _, rows in projection.parts), columns


def own_part(
    run: Callable[..., Any], layers: nnx.List, split: int, x: Float[Array, "B S E"], shared: Context, *rest: Any
) -> Any:
    """`run(layers, x, shared, *rest)` inside an island whose arrays lie as `part_specs` says.

    Args:
        run: as for `layers_on_parts`.
        layers: around this device's part of their arrays; changed in place.
        split: `split_axis` of the whole batch.
        x: the input, of this device's tokens.
        shared: that all layers read.
        rest: more arguments.
    """
    for layer in layers:
        _shrink(layer, devices_along(TENSOR), TensorTokens(split))
    return run(layers, x, shared, *rest)


def part_specs(state: Any, axes: TensorAxes, rows: int, *, stacked: bool) -> tuple[P, Any, Context]:
    """PartitionSpecs of the layers' input, their arrays and the `Context`, for an island over `tensor`.

    Args:
        state: of the layers of one period, with weights as `held_apart` and adapters as `copied` makes them.
        axes: of the model.
        rows: of the whole batch.
        stacked: whether the arrays lead with an axis over layers.
    """
    of_tokens = P(BATCH, CONTEXT)
    context = Context(of_tokens, P(BATCH), P(), of_tokens, of_tokens)  # pyright: ignore
    return rows_split(rows), _specs(state, axes, int(stacked)), context


def _check_adapters(projection: Projection, devices: int) -> None:
    """Refuse adapters that read more than a device's part, and fake quantisers.

    DoRA has norms of whole rows, dropout masks of whole inputs, a quantiser scales of whole groups.

    Raises:
        ConfigError: there are such.
    """
    if projection.quantizer is not None:
        raise ConfigError(f"parallel.tensor: expected 1 with training.qat, got {devices}")
    for name, adapter in projection.adapters.items():
        if adapter.magnitude is not None or adapter.dropout:
            what = "use_dora" if adapter.magnitude is not None else f"lora_dropout {adapter.dropout}"
            raise ConfigError(f"parallel.tensor: expected 1 with {what} (on {name}), got {devices}")


def _specs(state: Any, axes: TensorAxes, lead: int) -> Any:
    """PartitionSpecs of the arrays of some layers, which lead with `lead` axes over layers."""

    def of(keys: tuple[Any, ...], leaf: Any) -> Any:
        group, last = keys[1:3], keys[-1]  # after position
        by_rows, by_columns = group in axes.by_rows, group in axes.by_columns
        if last == "weight" and (by_rows or by_columns):
            places = as_weight(leaf).axes(TENSOR if by_rows else None, TENSOR if by_columns else None)
            return jax.tree.map(lambda place: P(*[None] * lead, *place), places, is_leaf=lambda one: isinstance(one, P))
        if last not in _ADAPTER:
            return P()
        copies, *places = _adapter_axes(keys, axes)
        return P(*[None] * lead, *([copies] if leaf.ndim > lead + len(places) else []), *places)

    return _by_keys(of, state)


def _by_keys(of: Callable[[tuple[Any, ...], Any], Any], tree: Any) -> Any:
    """A tree of the results of (keys, array or weight)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: of(tuple(key.key for key in path), leaf), tree, is_leaf=lambda leaf: isinstance(leaf, Weight)
    )


def _adapter_axes(keys: tuple[Any, ...], axes: TensorAxes) -> tuple[Any, ...]:
    """The mesh axes of an adapter's copies [copies, rows, columns]."""
    group, last = keys[1:3], keys[-1]
    rows = TENSOR if last == "lora_B" and group in axes.by_rows else None
    columns = TENSOR if last == "lora_A" and group in axes.by_columns else None
    alike = (*BATCH, CONTEXT, TENSOR) if rows is columns is None else (*BATCH, CONTEXT)
    return on_axes(alike, jax.sharding.get_abstract_mesh()), rows, columns


def _count(axes: tuple[str, ...] | None) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in axes or ())


def _shrink(layer: Any, devices: int, tokens: Tokens) -> None:
    """Make a layer with a device's part of the arrays a layer of that size, which has a device's tokens."""
    mixer, mlp, device = layer.mixer, layer.mlp, lax.axis_index(TENSOR)
    for projection in (*mixer.inner, *mlp.inner, *mixer.outer, *mlp.outer):
        _check_adapters(projection, devices)
        for adapter in projection.adapters.values():
            for matrix in (adapter.lora_A, adapter.lora_B):
                if matrix[...].ndim == 3:  # [1, rows, columns]: this device's copy
                    matrix.set_value(matrix[0])
    if not isinstance(mixer, Attention):
        raise ConfigError(f"parallel.tensor: expected 1 with layers of {layer.block}, got {devices}")
    layer.tokens = tokens
    heads, key_heads, size = mixer.shape
    mixer.shape = (heads // devices, key_heads // devices, size)
    if mixer.sinks is not None:
        weight = mixer.sinks.weight
        weight.set_value(_own_rows(weight[...], (heads,), devices, device))
    for projection in (*mixer.inner, *mlp.inner):
        sizes = tuple(rows for _, rows in projection.parts)
        projection.parts = tuple((name, rows // devices) for name, rows in projection.parts)
        projection.weight.set_value(_shard(projection.weight.get_value()))
        if projection.bias is not None:
            projection.bias.set_value(_own_rows(projection.bias[...], sizes, devices, device))
    for projection in (*mixer.outer, *mlp.outer):
        projection.weight.set_value(_shard(projection.weight.get_value()))
        projection.output_tokens = tokens


def _shard(weight: WeightLike) -> WeightLike:
    """A weight around a device's part of its arrays; of several weights one."""
    pieces = weight.weights if isinstance(weight, MixedWeight) else (weight,)
    return concatenate([as_weight(piece).shard().held for piece in pieces])


def _own_rows(array: Array, sizes: Sequence[int], devices: int, device: Array) -> Array:
    """A device's rows of each of several parts."""
    counts = [rows // devices for rows in sizes]
    starts = [part.start + device * count for part, count in zip(row_slices(sizes), counts, strict=True)]
    return jnp.concatenate([lax.dynamic_slice_in_dim(array, *bounds) for bounds in zip(starts, counts, strict=True)])


def _is_apart(weight: WeightLike, sizes: tuple[int, ...], columns: int) -> bool:
    """Whether a weight is one a part, in a form that splits."""
    pieces = list(map(as_weight, weight.weights if isinstance(weight, MixedWeight) else (weight,)))
    return tuple(piece.shape[0] for piece in pieces) == sizes and all(piece.splits(columns) for piece in pieces)


def _apart(weight: WeightLike, sizes: tuple[int, ...], columns: int) -> WeightLike:
    """A weight as one a part, in a form that splits.

    Args:
        weight: in a stack of layers or not.
        sizes: rows of its parts.
        columns: parts into which its columns are to be split.
    """
    if _is_apart(weight, sizes, columns):
        return weight
    array = jax.tree.leaves(weight)[0]
    split = _rows_apart(weight, sizes, array.ndim > 2)
    for piece in split:
        if not as_weight(piece).splits(columns):
            shape = as_weight(piece).shape
            raise ConfigError(
                f"parallel.tensor: expected weights in 4 (NF4), 16 or 32 bits whose {shape[1]} columns are whole "
                f"blocks on {columns} devices, got {' and '.join(as_weight(piece).formats)} {shape}"
            )
    return split[0] if len(split) == 1 else MixedWeight(split)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rows_apart(weight: WeightLike, sizes: tuple[int, ...], stacked: bool) -> tuple[WeightLike, ...]:
    """The rows of each part."""

    def apart(weight: WeightLike) -> tuple[WeightLike, ...]:
        return tuple(rows_of(weight, here) for here in row_slices(sizes))

    return jax.vmap(apart)(weight) if stacked else apart(weight)
