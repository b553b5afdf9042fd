"""Rows whose tokens lie on several devices, in the order that attention takes them (`pallas_kernels.attention.ring`).

A row is cut into 2n parts for n devices along `context`, and device i holds parts i and 2n-1-i. A batch's arrays of
numbers lie whole on all devices of a row (`batch_sharding`): each takes its own parts, and no tokens travel. Only the
last hidden states do, back into the row's order, so that a loss sees rows as it passed them in.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fastjax.parallel.islands import BATCH, CONTEXT, local


def context_devices() -> int:
    """The number of devices over which the ambient mesh splits a row's tokens."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(CONTEXT, 1)


def own_tokens(tree: Any) -> Any:
    """Arrays [B, S, …] that lie whole on all devices of a row, each device's parts of them; themselves on one device.

    Args:
        tree: of arrays, or of None.
    """
    devices = context_devices()
    if devices == 1:
        return tree

    def own(tree: Any) -> Any:
        device = lax.axis_index(CONTEXT)

        def parts(array: Array) -> Array:
            size = array.shape[1] // (2 * devices)
            starts = (device * size, (2 * devices - 1 - device) * size)
            return jnp.concatenate([lax.dynamic_slice_in_dim(array, start, size, axis=1) for start in starts], axis=1)

        return jax.tree.map(parts, tree)

    return local(own, in_specs=(P(BATCH),), out_specs=P(BATCH, CONTEXT))(tree)


def in_order(hidden: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Rows of `own_tokens`' parts in their own order, of which each device has an equal piece.

    Args:
        hidden: activations.
    """
    devices = context_devices()
    if devices == 1:
        return hidden
    # Device d holds one part of an even number and one of an odd; piece i of the row is parts 2i and 2i + 1.
    owners = [part if part < devices else 2 * devices - 1 - part for part in range(2 * devices)]
    routes = [[(owners[2 * piece + odd], piece) for piece in range(devices)] for odd in (0, 1)]

    def ordered(hidden: Array) -> Array:
        first, second = jnp.split(hidden, 2, axis=1)
        swapped = lax.axis_index(CONTEXT) % 2 == 1
        even, odd = jnp.where(swapped, second, first), jnp.where(swapped, first, second)
        parts = (lax.ppermute(part, CONTEXT, route) for part, route in zip((even, odd), routes, strict=True))
        return jnp.concatenate(list(parts), axis=1)

    tokens = P(BATCH, CONTEXT)
    return local(ordered, in_specs=(tokens,), out_specs=tokens)(hidden)
