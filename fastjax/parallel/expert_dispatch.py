"""Tokens on their way to the devices that hold their experts, and back.

Device d of the mesh axis `expert` holds the experts d·X/n to (d + 1)·X/n - 1. A token goes once to each device that
holds any of its experts, whatever their number there; that device returns one sum (as node-limited dispatch does it in
DeepSeek-V3, arXiv 2412.19437). Shapes are static: a device sends each other one up to all of its N tokens, so there is
room for N from each, and no token is ever dropped. The room travels whole: of 8 choices nearly every token goes to each
of two devices, and two of three to each of eight (XLA's ragged all-to-all, which sends them alone, has 3 GB/s between
GPUs of a host, where an all-to-all reaches 353: docs/lab/several_gpus.md). All of it is called inside an island, and
sums have a fixed order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

AXIS = "expert"


class Dispatch(NamedTuple):
    """The choices that this device computes, and where its tokens go; n devices, N tokens, k choices each.

    Attributes:
        own: experts of one device.
        experts: numbers among this device's experts, of all T = n·N tokens that come to it, int32 [T, k]; `own` of
            choices that lie elsewhere and of empty slots.
        weights: of these choices [T, k], there zero.
        tokens: the token in each place that is sent, int32 [n, N]: those that go to a device in their order, then the
            others; None: there is one device, whose tokens stay.
        slots: number of each token among those that go to a device, int32 [N, n]; -1: it does not go there.
        owners: device of each choice, int32 [N, k].
    """

    own: int
    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    tokens: Int[Array, "n N"] | None = None
    slots: Int[Array, "N n"] | None = None
    owners: Int[Array, "N k"] | None = None

    def send(self, x: Float[Array, "N E"]) -> Float[Array, "T E"]:
        """The rows of all tokens that come to this device; what is in empty slots has no meaning."""
        return x if self.tokens is None else _swap(x[self.tokens]).reshape(-1, x.shape[1])

    def returned(self, y: Float[Array, "T E"]) -> Float[Array, "N E"]:
        """Each token's sum of what its devices return, accumulated in float32, in the dtype of y."""
        if self.slots is None:
            return y
        count, devices = self.slots.shape
        back = _swap(y.reshape(devices, count, -1)).reshape(-1, y.shape[1])
        slots = self.slots + count * jnp.arange(devices, dtype=jnp.int32)[None]
        rows = back[jnp.where(self.slots < 0, 0, slots)].astype(jnp.float32)
        return jnp.sum(jnp.where((self.slots < 0)[:, :, None], 0, rows), axis=1).astype(y.dtype)

    def returned_choices(self, values: Float[Array, "T k"]) -> Float[Array, "N k"]:
        """A number of each choice, from the device that holds its expert."""
        if self.slots is None or self.owners is None:
            return values
        count, choices = self.owners.shape
        back = _swap(values.reshape(-1, count, choices))
        slots = jnp.take_along_axis(self.slots, self.owners, axis=1)
        return back[self.owners, slots, jnp.arange(choices, dtype=jnp.int32)[None, :]]


def plan_dispatch(experts: Int[Array, "N k"], weights: Float[Array, "N k"], count: int) -> Dispatch:
    """Find where each token goes, and what comes; in an island over `expert`, or on one device.

    Args:
        experts: chosen by each of this device's tokens.
        weights: of these choices.
        count: experts of all devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    devices = mesh.shape[AXIS] if kinds.get(AXIS) == AxisType.Manual else 1
    if devices == 1:
        return Dispatch(count, experts, weights)
    own = count // devices
    owners = experts // own
    goes = jnp.any(owners[:, :, None] == jnp.arange(devices, dtype=owners.dtype)[None, None, :], axis=1)
    slots = jnp.where(goes, jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1, -1)
    numbers = jnp.broadcast_to(jnp.arange(goes.shape[0], dtype=jnp.int32)[None, :], (devices, goes.shape[0]))
    _, tokens = jax.lax.sort((~goes.T, numbers), dimension=1, num_keys=1, is_stable=True)
    first = own * jnp.arange(devices, dtype=experts.dtype)[:, None, None]
    here = owners[tokens] == first // own
    local = _swap(jnp.where(here, experts[tokens] - first, own)).reshape(-1, experts.shape[1])
    factors = _swap(jnp.where(here, weights[tokens], 0)).reshape(-1, experts.shape[1])
    return Dispatch(own, local, factors, tokens, slots, owners)


def _swap(parts: Array) -> Array:
    """[n, …] for each device -> from each."""
    return jax.lax.all_to_all(parts, AXIS, 0, 0, tiled=True)
