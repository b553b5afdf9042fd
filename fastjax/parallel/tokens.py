"""Tokens of rows on several devices: along `context` everywhere, along `tensor` between the layers.

A row is cut into 2n parts for n devices along `context`, and device i holds parts i and 2n-1-i, as attention takes them
(`pallas_kernels.attention.ring`). A batch's arrays of numbers lie whole on all devices of a row (`batch_sharding`):
each takes its own parts, and no tokens travel. Only the last hidden states do, back into the row's order, so that a
loss sees rows as it passed them in.

Of the devices along `tensor` each has a part of the tokens between the layers (sequence parallelism, Korthikanti et
al., arXiv 2205.05198): norms and residual stream are computed once. Attention and MLP read all tokens, and each
device's products back are shares of a sum, of which it keeps its own tokens. These are whole rows where the rows
divide, since collectives put arrays one after another: pieces of several rows would be copied into place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fastjax.parallel.islands import BATCH, CONTEXT, ROWS, TENSOR, batch_devices, devices_along, knows_devices, local
from pallas_kernels import token_exchange


def own_tokens(tree: Any) -> Any:
    """Arrays [B, S, …] that lie whole on all devices of a row, each device's parts of them; themselves on one device.

    Args:
        tree: of arrays, or of None.
    """
    devices = devices_along(CONTEXT)
    if devices == 1:
        return tree

    def take(tree: Any) -> Any:
        device = lax.axis_index(CONTEXT)

        def parts(array: Array) -> Array:
            size = array.shape[1] // (2 * devices)
            starts = (device * size, (2 * devices - 1 - device) * size)
            return jnp.concatenate([lax.dynamic_slice_in_dim(array, start, size, axis=1) for start in starts], axis=1)

        return jax.tree.map(parts, tree)

    return local(take, in_specs=(P(BATCH),), out_specs=P(BATCH, CONTEXT))(tree)


def in_order(hidden: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Rows of `own_tokens`' parts in their own order, of which each device has an equal piece.

    Args:
        hidden: activations.
    """
    devices = devices_along(CONTEXT)
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


def split_axis(rows: int) -> int:
    """The axis of [B, S, …] that lies on the devices along `tensor`: 0 where the rows divide, else 1.

    Args:
        rows: of the whole batch, outside of islands.
    """
    return int(-(-rows // batch_devices()) % devices_along(TENSOR) > 0)


def rows_split(rows: int) -> P:
    """Where arrays [B, S, …] lie between the layers, outside of islands.

    Args:
        rows: of the whole batch.
    """
    return P((*BATCH, TENSOR), CONTEXT) if split_axis(rows) == 0 else ROWS


def all_tokens(x: Float[Array, "..."], axis: int = 0, along: str = TENSOR) -> Float[Array, "..."]:
    """The tokens of all devices along a mesh axis, in order, from each one's own; on one device themselves.

    Args:
        x: a device's own.
        axis: of x, on which they are joined; between the layers `split_axis` of the batch.
        along: the mesh axis.
    """
    return x if devices_along(along) == 1 else token_exchange.all_tokens(x, along, axis, _implementation())


def own_sums(
    x: Float[Array, "..."], axis: int = 0, along: str = TENSOR, travel: DTypeLike | None = None
) -> Float[Array, "..."]:
    """The sum over the devices along a mesh axis, of each one's own tokens; the way back from `all_tokens`.

    Args:
        x: a device's share of the sum, of all tokens.
        axis: as for `all_tokens`.
        along: the mesh axis.
        travel: dtype of the shares that travel; None: that of x.
    """
    return x if devices_along(along) == 1 else token_exchange.own_sums(x, along, axis, _implementation(), travel)


def _implementation() -> str | None:
    """The implementation of exchanges: of devices that are not known by number XLA's collectives."""
    return None if knows_devices() else "xla"
