"""One layer of stacks whose rows are split over devices: the public function.

Implementations, in order of preference:

- ``mosaic``: Hopper GPUs (compute capability 9.0) of one process, jax 0.11, shards of 2 KiB or more.
  Each device reads the others' memory: nobody sends, and nobody waits. The stacks have to be there on all devices when
  the first one reads, and to stay as long as the last one does, which is the caller's care: whatever makes `layer` wait
  for a collective of the program does the first, a collective behind the last use the second.
- ``xla``: everything else; a slice and an all-gather.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from pallas_kernels import compat
from pallas_kernels.dispatch import Implementation, Registry, Target
from pallas_kernels.shard_gather import mosaic_sm90

#: Devices whose addresses jaxlib's Mosaic has room for.
_DEVICES = 8


def gather(
    stacks: Sequence[Array], layer: Int[Array, ""], axis_name: str, *, implementation: str | None = None
) -> list[Array]:
    """Gather a layer's arrays in an island over a mesh axis: [L, n, …] on each of D devices to [D · n, …] on all.

    Args:
        stacks: this device's rows of the layers' arrays, of any dtypes.
        layer: index, int32.
        axis_name: of the mesh axis; the island is over all axes of the mesh.
        implementation: None, "mosaic" or "xla".

    Returns:
        The arrays, in the order of the stacks. Not differentiable.

    Raises:
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for place, stack in enumerate(stacks):
        chosen = REGISTRY.choose(implementation, shape=stack.shape, dtype=stack.dtype)
        groups.setdefault((chosen, stack.dtype.name), []).append(place)
    gathered: dict[int, Array] = {}
    for (chosen, _), places in groups.items():
        whole = REGISTRY[chosen].forward([stacks[place] for place in places], layer, axis_name)
        gathered |= zip(places, whole, strict=True)
    return [gathered[place] for place in range(len(stacks))]


def why_not_peers(target: Target) -> str | None:
    """Why kernels cannot read the memory of a mesh's other devices: a clause; None where they can.

    Args:
        target: the device.
    """
    if reason := target.lacks((9, 0), exactly=True):
        return reason
    if compat.JAX_VERSION < (0, 11):
        return f"it needs jax 0.11, this is {jax.__version__}"
    if jax.process_count() > 1:
        return f"one process has all GPUs, this is one of {jax.process_count()}"
    if jax.device_count() > _DEVICES:
        return f"it serves up to {_DEVICES} GPUs, these are {jax.device_count()}"
    return None


def _why_not_mosaic(device: Target, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    if reason := why_not_peers(device):
        return reason
    if not mosaic_sm90.suits(shape, jnp.dtype(dtype).itemsize):
        least = mosaic_sm90.LEAST_BYTES
        return f"a layer's shard has {least} bytes or more, in sixteens, this is {dtype} {shape[1:]}"
    return None


def _mosaic(stacks: Sequence[Array], layer: Int[Array, ""], axis_name: str) -> list[Array]:
    return mosaic_sm90.gather(stacks, layer, axis_name=axis_name)


def _xla(stacks: Sequence[Array], layer: Int[Array, ""], axis_name: str) -> list[Array]:
    shards = [lax.dynamic_index_in_dim(stack, layer, keepdims=False) for stack in stacks]
    return [lax.all_gather(shard, axis_name, tiled=True) for shard in shards]


#: forward(stacks of one dtype, layer, axis_name) -> whole arrays
REGISTRY = Registry(
    "shard_gather.gather", {"mosaic": Implementation(_mosaic, why_not=_why_not_mosaic), "xla": Implementation(_xla)}
)
