"""Tokens of the devices that share each layer's heads and features, inside an island.

Between the layers each of them has a piece of every row (sequence parallelism, Korthikanti et al., arXiv 2205.05198):
norms and residual stream are computed once. Attention and MLP read all tokens, and each device's output is a share of
the sum, of which it keeps its own tokens.
"""

import jax
from jax import lax
from jaxtyping import Array, Float

from fastjax.parallel.islands import TENSOR


def tensor_devices() -> int:
    """The number of devices over which the ambient mesh splits heads and features."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(TENSOR, 1)


def all_tokens(x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """The tokens of all devices along `tensor`, in order, from each one's own; on one device themselves."""
    return x if tensor_devices() == 1 else lax.all_gather(x, TENSOR, axis=1, tiled=True)


def own_sums(x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """The sum over the devices along `tensor`, of each one's own tokens; the way back from `all_tokens`."""
    return x if tensor_devices() == 1 else lax.psum_scatter(x, TENSOR, scatter_dimension=1, tiled=True)
