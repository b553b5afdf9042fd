"""Tokens on their way to the devices that hold their experts, and back.

Device d of the mesh axis `expert` holds the experts d·X/n to (d + 1)·X/n - 1. A token goes once to each device that
holds any of its experts, whatever their number there; that device returns one sum (as node-limited dispatch does it in
DeepSeek-V3, arXiv 2412.19437). Shapes are static: a device sends each other one up to all of its N tokens, so there is
room for N from each, and no token is ever dropped. The room travels whole among as many devices as one host has: of 8
choices nearly every token goes to each of two devices, and two of three to each of eight. Among more NVIDIA GPUs only
the tokens that go do (a ragged all-to-all). All of it is called inside an island, and sums have a fixed order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch

AXIS = "expert"
#: Devices among which the room travels whole. XLA's ragged all-to-all between up to 8 GPUs of a host is one kernel of
#: few thread blocks (3 GB/s where an all-to-all reaches 353, docs/lab/several_gpus.md); among more it sends by NCCL.
WHOLE_ROOM = 8


class Dispatch(NamedTuple):
    """Where this device's tokens go; n devices, N tokens, k choices each.

    Attributes:
        tokens: the token in each place that is sent, int32 [n, N]: those that go to a device in their order, then the
            others.
        places: place of each token among those that go to a device, int32 [N, n]; -1: it does not go there.
        owners: device of each choice, int32 [N, k].
        sent: tokens that go to each device, int32 [n].
        received: tokens that come from each, int32 [n].
    """

    tokens: Int[Array, "n N"]
    places: Int[Array, "N n"]
    owners: Int[Array, "N k"]
    sent: Int[Array, " n"]
    received: Int[Array, " n"]


def expert_devices() -> int:
    """The number of devices over which the island that the caller is in splits experts."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh.shape[AXIS] if kinds.get(AXIS) == AxisType.Manual else 1


def plan_dispatch(experts: Int[Array, "N k"], own: int) -> Dispatch:
    """Find where each token goes.

    Args:
        experts: chosen by each of this device's tokens.
        own: experts of one device.
    """
    devices = expert_devices()
    owners = experts // own
    goes = jnp.any(owners[:, :, None] == jnp.arange(devices, dtype=owners.dtype)[None, None, :], axis=1)
    places = jnp.where(goes, jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1, -1)
    numbers = jnp.broadcast_to(jnp.arange(goes.shape[0], dtype=jnp.int32)[None, :], (devices, goes.shape[0]))
    _, tokens = jax.lax.sort((~goes.T, numbers), dimension=1, num_keys=1, is_stable=True)
    sent = jnp.sum(goes, axis=0, dtype=jnp.int32)
    return Dispatch(tokens, places, owners, sent, _swap(sent))


def send_choices(
    plan: Dispatch, experts: Int[Array, "N k"], weights: Float[Array, "N k"], own: int
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The choices of all tokens that come to this device, T = n·N.

    Args:
        plan: of this device's tokens.
        experts: of each.
        weights: of these.
        own: experts of one device.

    Returns:
        Numbers among this device's experts, `own` of choices that lie elsewhere and of empty places; and weights, there
        zero.
    """
    first = own * jnp.arange(plan.sent.shape[0], dtype=experts.dtype)[:, None, None]
    here = plan.owners[plan.tokens] == first // own
    local = _swap(jnp.where(here, experts[plan.tokens] - first, own))
    factors = _swap(jnp.where(here, weights[plan.tokens], 0))
    return local.reshape(-1, experts.shape[1]), factors.reshape(-1, weights.shape[1])


def send(plan: Dispatch, x: Float[Array, "N E"]) -> Float[Array, "T E"]:
    """The rows of all tokens that come to this device; what is in empty places has no meaning.

    Args:
        plan: of this device's tokens.
        x: their rows.
    """
    return _exchange(x[plan.tokens], plan.sent, plan.received)


def returned(plan: Dispatch, y: Float[Array, "T E"]) -> Float[Array, "N E"]:
    """Each token's sum of what its devices return, accumulated in float32, in the dtype of y.

    Args:
        plan: of this device's tokens.
        y: this device's results for all that came.
    """
    back = _exchange(y.reshape(plan.sent.shape[0], -1, y.shape[1]), plan.received, plan.sent)
    places = plan.places + back.shape[0] // plan.sent.shape[0] * jnp.arange(plan.sent.shape[0], dtype=jnp.int32)[None]
    rows = back[jnp.where(plan.places < 0, 0, places)].astype(jnp.float32)
    return jnp.sum(jnp.where((plan.places < 0)[:, :, None], 0, rows), axis=1).astype(y.dtype)


def returned_choices(plan: Dispatch, values: Float[Array, "T k"]) -> Float[Array, "N k"]:
    """A number of each choice, from the device that holds its expert.

    Args:
        plan: of this device's tokens.
        values: this device's, of all that came.
    """
    count, choices = plan.owners.shape
    back = _swap(values.reshape(-1, count, choices))
    places = jnp.take_along_axis(plan.places, plan.owners, axis=1)
    return back[plan.owners, places, jnp.arange(choices, dtype=jnp.int32)[None, :]]


def _swap(parts: Array) -> Array:
    """[n, …] for each device -> from each."""
    return jax.lax.all_to_all(parts, AXIS, 0, 0, tiled=True)


def _exchange(rows: Float[Array, "n N E"], sent: Int[Array, " n"], received: Int[Array, " n"]) -> Float[Array, "T E"]:
    """The first `sent` rows for each device -> the first `received` from each, in room for N."""
    devices, room, width = rows.shape
    if devices <= WHOLE_ROOM or dispatch.target().platform != "cuda":
        return _swap(rows).reshape(-1, width)
    starts = room * jnp.arange(devices, dtype=jnp.int32)
    there = jnp.full((devices,), room, jnp.int32) * jax.lax.axis_index(AXIS)
    flat = rows.reshape(-1, width)
    return jax.lax.ragged_all_to_all(flat, jnp.zeros_like(flat), starts, sent, there, received, axis_name=AXIS)
