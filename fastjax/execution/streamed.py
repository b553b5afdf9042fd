"""A loop over a stack of layers; matrices and residuals in the host's memory are on the device one layer before use.

While a layer computes, in the forward and in the backward pass, the next one's matrices come over the bus: the device
holds two layers (as ZeRO-Infinity prefetches, arXiv 2104.07857). Adapters, norms and other vectors stay on the device.
Large residuals go to the host while the next layer computes, and come back while the layer after it is differentiated.

The loops have a derivative of their own, since a scan's would keep every layer's copy for the backward pass, and would
fill the room for all layers' residuals with zeros first: a fiftieth of a step. A layer's residuals are those that its
policy of rematerialisation keeps. What the backward pass has anyway, or fetches again (the matrices, the arrays on the
device, what all layers share), is taken out of them and put back there; what a layer makes of these alone and keeps is
kept for every layer. A copy in a loop is a plain transfer beside the
products if its offset is linear in the loop's counter, so loops with copies end one layer early and the last one
follows them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float

from fastjax.host_memory import fetched, in_host_memory

#: (x, the layer's arrays, arrays that all layers read, its number) -> (output, sums).
Layer = Callable[[Array, Any, Any, Array], tuple[Array, Any]]


def is_streamed(leaf: Any, layers: int) -> bool:
    """Whether an array of a stack goes to the host's memory: matrices and packed codes do, of stacks.

    Args:
        leaf: with the layers' axis where there is one.
        layers: of the stack.
    """
    return layers > 1 and (leaf.ndim > 2 or leaf.dtype == jnp.uint8)


def layer_at(stack: Any, index: int) -> Any:
    """One layer's arrays on the device.

    Args:
        stack: leaves with a leading axis, in either memory.
        index: of the layer.
    """
    return _layer_at(stack, np.int32(index))


def has_streamed(state: Any) -> bool:
    """Whether some arrays of a stack lie in the host's memory."""
    return any(map(in_host_memory, jax.tree.leaves(state)))


def on_device(state: Any) -> Any:
    """A layer's arrays, sent to the device where they are not there."""
    device = jax.memory.Space.Device
    return jax.tree.map(lambda leaf: jax.device_put(leaf, device) if in_host_memory(leaf) else leaf, state)


def run_streamed(
    layer: Layer, x: Float[Array, "B S E"], state: Any, shared: Any, count: int, *, offload: bool = False
) -> tuple[Float[Array, "B S E"], Any]:
    """The last layer's output, and the sums of each layer along a leading axis.

    Args:
        layer: one layer, with its rematerialisation.
        x: the first layer's input.
        state: the layers' arrays along a leading axis, some of them in the host's memory, where they are frozen.
        shared: arrays that all layers read; constants for the gradient.
        count: number of layers, at least 2.
        offload: keep residuals of at least a sixteenth of x's bytes in the host's memory.
    """
    least = x.size * x.dtype.itemsize // 16 if offload else math.inf
    leaves, structure = jax.tree.flatten(state)
    in_host = tuple(map(in_host_memory, leaves))
    near = [leaf for leaf, far in zip(leaves, in_host, strict=True) if not far]
    far = [leaf for leaf, there in zip(leaves, in_host, strict=True) if there]

    def one(index: Any, x: Array, near: Sequence[Any], far: Sequence[Any], shared: Any) -> tuple[Array, Any]:
        sources = {False: iter(near), True: iter(far)}
        return layer(x, structure.unflatten([next(sources[there]) for there in in_host]), shared, index)

    @jax.custom_vjp
    def loop(x, near, far, shared):
        return _forward(one, count, x, near, far, shared, None, least)[0]

    def forward(x, near, far, shared):
        if any(leaf.perturbed for leaf in jax.tree.leaves((far, shared))):
            raise NotImplementedError("no gradient of arrays that all layers read, or that the host's memory holds")
        moves = [leaf.perturbed for leaf in near]
        x, near, far, shared = jax.tree.map(lambda leaf: leaf.value, (x, near, far, shared))
        results, saved = _forward(one, count, x, near, far, shared, moves, least)
        moving = [leaf if moved else None for leaf, moved in zip(near, moves, strict=True)]
        fixed = [None if moved else leaf for leaf, moved in zip(near, moves, strict=True)]
        return results, (saved, moving, fixed, far, shared)

    def backward(residuals, gradients):
        saved, moving, fixed, far, shared = residuals
        near = [f if m is None else m for m, f in zip(moving, fixed, strict=True)]
        moves = [leaf is not None for leaf in moving]
        dx, dnear = _backward(count, saved, near, far, shared, moves, jax.tree.map(_instantiated, gradients))
        gradients_near = iter(dnear)
        return dx, [next(gradients_near) if moved else None for moved in moves], None, None

    loop.defvjp(forward, backward, symbolic_zeros=True)
    return loop(x, near, far, shared)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Pullback:
    """The static half of a layer's backward pass.

    Attributes:
        structure: of `jax.vjp`'s function.
        sources: for each of its residuals (group, number): among the saved ones, those that the host keeps, the layer's
            arrays on the device or from the host, or what is shared.
    """

    structure: Any
    sources: tuple[tuple[str, int], ...]


class _Saved(NamedTuple):
    """The residuals of the forward pass.

    Attributes:
        pullback: the way in which residuals are put together again.
        stacks: the saved residuals of the layers.
        last: the last layer's arrays from the host.
        sent: the residuals in the host's memory, without the last layer's.
        held: the last layer's of these.
    """

    pullback: _Pullback
    stacks: list[Array]
    last: list[Array]
    sent: list[Array]
    held: list[Array]


def _forward(
    one: Callable[..., Any], count: int, x, near, far, shared, moves: Sequence[bool] | None, least: float
) -> tuple[tuple[Array, Any], _Saved | None]:
    """((output, sums), what the backward pass needs).

    `moves` says which arrays on the device have gradients, `least` the bytes of a residual that goes to the host.
    """
    pullbacks: list[_Pullback] = []
    step = _recorded(one, moves, least, pullbacks)
    here = [fetched(leaf, 0) for leaf in far]
    # Traced once: the loop's layers and the last one have the same residuals in the same order.
    traced, shapes = jax.make_jaxpr(step, return_shape=True)(jnp.int32(0), x, here, near, shared)
    structure = jax.tree.structure(shapes)

    def run(index, x, here) -> tuple[Array, tuple[Any, list[Array]], list[Array]]:
        return structure.unflatten(jaxpr_as_fun(traced)(*jax.tree.leaves((index, x, here, near, shared))))

    def body(carry: Any, _: None) -> tuple[Any, None]:
        number, x, here, stacks, sent = carry
        ahead, index = _ahead(far, number, 1, beside)
        x, made, large = run(index, x, here)
        away = [jax.device_put(leaf, jax.memory.Space.Host) for leaf in large]
        return (number + 1, x, ahead, _put(stacks, made, index), _put(sent, away, number)), None

    _, made, large = structure.unflatten(traced.out_avals)
    # Every layer writes its place; a scan's own stacks are filled with zeros before.
    stacks = jax.tree.map(lambda aval: jax.lax.empty((count, *aval.shape), aval.dtype), made)
    beside = near[:1] if len(large) > 1 else ()
    # Of unlike values: one array of zeros for two equal shapes would be copied, by the host, before the loop.
    rooms = [jnp.full((count - 1, *aval.shape), number, aval.dtype) for number, aval in enumerate(large)]
    sent = [jax.device_put(room, jax.memory.Space.Host) for room in rooms]
    apart = bool(far or large)
    first = (jnp.int32(0), x, here, stacks, sent)
    (number, x, here, stacks, sent), _ = jax.lax.scan(body, first, None, length=count - apart)
    held: list[Array] = []
    if apart:
        x, made, held = run(number, x, here)
        stacks = _put(stacks, made, number)
    sums, saved = stacks
    return (x, sums), (None if moves is None else _Saved(pullbacks[-1], saved, here, sent, held))


def _recorded(
    one: Callable[..., Any], moves: Sequence[bool] | None, least: float, pullbacks: list[_Pullback]
) -> Callable[..., tuple[Array, tuple[Any, list[Array]], list[Array]]]:
    """A layer as a step of the forward loop: its output, its sums and saved residuals, and those that the host keeps.

    Its backward pass is added to `pullbacks` when it is traced.
    """

    def step(index, x, here, near, shared) -> tuple[Array, tuple[Any, list[Array]], list[Array]]:
        arrays_near = _taken(near, index)
        if moves is None:
            y, sums = one(index, x, arrays_near, here, shared)
            return y, (sums, []), []
        pairs = list(zip(arrays_near, moves, strict=True))
        moving = [leaf for leaf, moved in pairs if moved]

        def moved_layer(x: Array, moving: list[Array]) -> tuple[Array, Any]:
            moved_arrays = iter(moving)
            arrays = [next(moved_arrays) if moved else leaf for leaf, moved in pairs]
            return one(index, x, arrays, here, shared)

        (y, sums), pull = jax.vjp(moved_layer, x, moving)
        residuals, structure = jax.tree.flatten(pull)
        known = {
            id(leaf): (group, number)
            for group, leaves in (("near", arrays_near), ("far", here), ("shared", jax.tree.leaves(shared)))
            for number, leaf in enumerate(leaves)
        }
        groups: dict[str, list[Array]] = {"saved": [], "sent": []}
        for leaf in residuals:
            if id(leaf) not in known:
                group = "sent" if leaf.size * leaf.dtype.itemsize >= least else "saved"
                known[id(leaf)] = group, len(groups[group])
                groups[group].append(leaf)
        groups["sent"] = _sent(groups["sent"], x)
        pullbacks.append(_Pullback(structure, tuple(known[id(leaf)] for leaf in residuals)))
        return y, (sums, groups["saved"]), groups["sent"]

    return step


def _backward(count: int, saved: _Saved, near, far, shared, moves: Sequence[bool], gradients: tuple[Array, Any]):
    """The gradients of x and of the arrays that have one, the last layer first."""
    dx, dsums = gradients

    def step(index: Any, dx: Array, here: list[Array], held: list[Array]) -> tuple[Array, list[Array]]:
        groups = {
            "sent": held,
            "saved": _taken(saved.stacks, index),
            "near": _taken(near, index),
            "far": here,
            "shared": jax.tree.leaves(shared),
        }
        residuals = [groups[group][number] for group, number in saved.pullback.sources]
        pull = saved.pullback.structure.unflatten(residuals)
        return pull((dx, jax.tree.map(lambda leaf: _at(leaf, index), dsums)))

    def body(carry: Any, _: None) -> tuple[Any, None]:
        number, dx, here, held, stacks = carry
        ahead, index = _ahead([*far, *saved.sent], number, -1)
        dx, made = step(index, dx, here, held)
        return (number - 1, dx, ahead[: len(far)], ahead[len(far) :], _put(stacks, made, index)), None

    stacks = [jax.lax.empty(leaf.shape, leaf.dtype) for leaf, moved in zip(near, moves, strict=True) if moved]
    apart = bool(far or saved.sent)
    first = (jnp.int32(count - 1), dx, saved.last, saved.held, stacks)
    (number, dx, here, held, stacks), _ = jax.lax.scan(body, first, None, length=count - apart)
    if apart:
        dx, made = step(number, dx, here, held)
        stacks = _put(stacks, made, number)
    return dx, stacks


@jax.jit
def _layer_at(stack: Any, index: Array) -> Any:
    def part(leaf: Array) -> Array:
        return fetched(leaf, index) if in_host_memory(leaf) else lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    return jax.tree.map(part, stack)


def _ahead(far: Sequence[Array], index: Array, step: int, near: Sequence[Array] = ()) -> tuple[list[Array], Array]:
    """The arrays of layer `index + step` from the host, and `index` for the layer that computes meanwhile.

    XLA begins a copy as soon as all that it takes is in its schedule, which is as late as something else takes it. So
    what computes must take as much: one number of each array, whose copies come before the large ones, and the large
    ones' offset.

    What a layer takes of stacks on the device would be copies too, behind the ones to the host in the same four queues.
    With a number of an array in `near` in its offset, XLA cannot make it a plain copy.
    """
    if not (far or near):
        return [], index
    following = index + step

    def number(leaf: Array) -> Array:
        start = (index, *(jnp.zeros((), index.dtype),) * (leaf.ndim - 1))
        one = jax.lax.dynamic_slice(leaf, start, (1,) * leaf.ndim, allow_negative_indices=False)
        one = jax.device_put(one, jax.memory.Space.Device).reshape(())
        return jax.lax.bitcast_convert_type(one, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.int32)

    zero, after = jax.lax.optimization_barrier((jnp.int32(0), following))
    numbers = sum(map(number, [*far, *near]), jnp.int32(0))
    return [fetched(leaf, following) for leaf in far], after - step + (numbers & zero)


def _sent(leaves: Sequence[Array], x: Array) -> list[Array]:
    """Residuals for the host. Beside others the layer's input goes as a copy, made when one of those is there.

    As it is, XLA would wait for it as soon as it is under way, before the layer computes.
    """
    sent = list(leaves)
    for index, leaf in enumerate(leaves):
        if leaf is x and len(leaves) > 1:
            unit, _ = jax.lax.optimization_barrier((jnp.ones((), x.dtype), leaves[index - 1]))
            sent[index] = x * unit
    return sent


def _taken(stacks: Sequence[Array], index: Any) -> list[Array]:
    return [_at(leaf, index) for leaf in stacks]


def _at(leaf: Array, index: Any) -> Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False, allow_negative_indices=False)


def _put(stacks: Any, layer: Any, index: Any) -> Any:
    """The stacks with a layer's arrays in their places."""

    def put(stack: Array, leaf: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(stack, leaf, index, 0, allow_negative_indices=False)

    return jax.tree.map(put, stacks, layer)


def _instantiated(gradient: Any) -> Array:
    if not isinstance(gradient, SymbolicZero):
        return gradient
    aval: Any = gradient.aval
    return jnp.zeros(aval.shape, aval.dtype)
