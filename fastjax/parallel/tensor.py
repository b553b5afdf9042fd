"""Tokens of the devices that share each layer's heads and features, inside an island.

Between the layers each of them has a part of the tokens (sequence parallelism, Korthikanti et al., arXiv 2205.05198):
norms and residual stream are computed once. Attention and MLP read all tokens, and each device's output is a share of
the sum, of which it keeps its own tokens. These are whole rows where the rows divide, since collectives put arrays one
after another: pieces of several rows would be copied into place.
"""

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fastjax.parallel.islands import BATCH, CONTEXT, ROWS, TENSOR, batch_devices


def tensor_devices() -> int:
    """The number of devices over which the ambient mesh splits heads and features."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(TENSOR, 1)


def split_axis(rows: int) -> int:
    """The axis of [B, S, …] that lies on the devices along `tensor`: 0 where the rows divide, else 1.

    Args:
        rows: of the whole batch, outside of islands.
    """
    return int(-(-rows // batch_devices()) % tensor_devices() > 0)


def rows_split(rows: int) -> P:
    """Where arrays [B, S, …] lie between the layers, outside of islands.

    Args:
        rows: of the whole batch.
    """
    return P((*BATCH, TENSOR), CONTEXT) if split_axis(rows) == 0 else ROWS


def all_tokens(x: Float[Array, "B S E"], axis: int) -> Float[Array, "B S E"]:
    """The tokens of all devices along `tensor`, in order, from each one's own; on one device themselves.

    Args:
        x: a device's own.
        axis: `split_axis` of the batch.
    """
    return x if tensor_devices() == 1 else lax.all_gather(x, TENSOR, axis=axis, tiled=True)


def own_sums(x: Float[Array, "B S E"], axis: int) -> Float[Array, "B S E"]:
    """The sum over the devices along `tensor`, of each one's own tokens; the way back from `all_tokens`.

    Args:
        x: a device's share of the sum, of all tokens.
        axis: `split_axis` of the batch.
    """
    return x if tensor_devices() == 1 else lax.psum_scatter(x, TENSOR, scatter_dimension=axis, tiled=True)
