"""An all-gather and a reduce-scatter along one axis of an array, in an island: the public functions.

Implementations, in order of preference:

- ``mosaic``: Hopper GPUs (compute capability 9.0) of one process, in the order of their numbers, jax 0.11; parts of
  1 MiB or more, of each row whole pieces of 2 KiB. Each device reads what it needs in the others' memory. It runs in
  the program's own order, and nothing beside it. Sums are made in float32 and rounded once.
- ``xla``: everything else; XLA's collectives, sums in float32 too.

Shares of a sum in float32 may travel in 16 bits; a device's own share stays as it is. So a sum and what is added to it
are still rounded once, and no small addend meets a sum that rounding keeps.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import FLOATS, Implementation, Registry, Target
from pallas_kernels.shard_gather import why_not_peers
from pallas_kernels.shard_gather.mosaic_sm90 import LEAST_BYTES
from pallas_kernels.token_exchange import mosaic_sm90

#: A device's part from which reading it is faster than NCCL: smaller ones are latency alone, which NCCL has beside
#: other kernels.
_LEAST_PART = 1 << 20


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def all_tokens(
    x: Float[Array, "..."], axis_name: str, axis: int, implementation: str | None = None
) -> Float[Array, "..."]:
    """All-gather along a mesh axis, in an island: [B, S, E] → [devices · B, S, E] or [B, devices · S, E].

    Args:
        x: this device's part, bfloat16, float16 or float32.
        axis_name: of the mesh axis; the island is over all axes of the mesh.
        axis: of x, along which the parts are joined, counted from its first.
        implementation: None, "mosaic" or "xla".

    Raises:
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    part = math.prod(x.shape[axis:])
    chosen = REGISTRY.choose(implementation, direction="forward", part=part, size=x.size, dtype=x.dtype)
    return REGISTRY[chosen].forward(x, axis_name, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def own_sums(
    x: Float[Array, "..."],
    axis_name: str,
    axis: int,
    implementation: str | None = None,
    travel: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Reduce-scatter along a mesh axis, in an island; the transpose of `all_tokens`, and differentiable as that is.

    Args:
        x: this device's addend of all parts, bfloat16, float16 or float32.
        axis_name: of the mesh axis; the island is over all axes of the mesh.
        axis: of x, along which it is split, counted from its first.
        implementation: None, "mosaic" or "xla".
        travel: dtype to which addends for other devices are rounded; None: that of x. The sums have that of x.

    Raises:
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    devices = lax.axis_size(axis_name)
    part = math.prod(x.shape[axis:]) // devices
    travel = jnp.dtype(travel or x.dtype)
    chosen = REGISTRY.choose(implementation, direction="backward", part=part, size=x.size // devices, dtype=travel)
    return REGISTRY[chosen].backward(x, axis_name, axis, travel)


def _linear(function: Any, back: Any) -> None:
    def forward(x: Array, *static: Any) -> tuple[Array, None]:
        return function(x, *static), None

    def backward(*arguments: Any) -> tuple[Array]:
        *static, _, dy = arguments
        return (back(dy, *static[:3]),)

    function.defvjp(forward, backward)


_linear(all_tokens, own_sums)
_linear(own_sums, all_tokens)


def _why_not_mosaic(device: Target, part: int, size: int, dtype: DTypeLike) -> str | None:
    if reason := why_not_peers(device):
        return reason
    if part >= 2**31:
        return f"its offsets are of 32 bits, and a part of {part} numbers has more"
    itemsize = jnp.dtype(dtype).itemsize
    if size * itemsize < _LEAST_PART or not mosaic_sm90.suits(part, itemsize):
        least, pieces = _LEAST_PART, LEAST_BYTES
        return f"a device's part has {least} bytes or more in whole pieces of {pieces}, this is {dtype} [{size}]"
    return None


def _gather(x: Array, axis_name: str, axis: int) -> Array:
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def _scatter(x: Array, axis_name: str, axis: int, travel: Any) -> Array:
    if travel.itemsize >= 4:
        return lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)
    # As many bytes as a reduce-scatter's, which would round at each device.
    parts = x.reshape(*x.shape[:axis], lax.axis_size(axis_name), -1, *x.shape[axis + 1 :])
    shares = lax.all_to_all(parts.astype(travel), axis_name, axis, axis, tiled=True)
    if x.dtype != travel:
        device = lax.axis_index(axis_name)
        own = lax.dynamic_index_in_dim(parts, device, axis)
        shares = lax.dynamic_update_index_in_dim(shares.astype(x.dtype), own, device, axis)
    return jnp.sum(shares, axis=axis, dtype=jnp.float32).astype(x.dtype)


#: forward(own part, axis_name, axis) -> all parts; backward(shares of all, axis_name, axis, travel) -> own sums
REGISTRY = Registry(
    "token_exchange",
    {
        "mosaic": Implementation(mosaic_sm90.gather, mosaic_sm90.scatter, dtypes=FLOATS, why_not=_why_not_mosaic),
        "xla": Implementation(_gather, _scatter),
    },
)
