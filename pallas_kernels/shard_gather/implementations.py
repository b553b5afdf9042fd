"""The implementations of the gather of shards, by name, in order of preference.

forward(stacks of one dtype, layer, axis_name) -> whole arrays
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from pallas_kernels import compat
from pallas_kernels.dispatch import Implementation, Registry, Target
from pallas_kernels.shard_gather import mosaic_sm90

#: Devices whose addresses jaxlib's Mosaic has room for.
_DEVICES = 8


class Case(NamedTuple):
    """A stack and its device.

    Attributes:
        target: the device.
        shape: of the stack, [L, n, …].
        dtype: its dtype.
    """

    target: Target
    shape: tuple[int, ...]
    dtype: DTypeLike


def why_not_peers(target: Target) -> str | None:
    """Why kernels cannot read the memory of a mesh's other devices: a clause; None where they can.

    Args:
        target: the device.
    """
    if target.platform != "cuda" or target.compute_capability != (9, 0):
        return f"it needs NVIDIA GPUs of compute capability 9.0, the target is {target}"
    if compat.JAX_VERSION < (0, 11):
        return f"it needs jax 0.11, this is {jax.__version__}"
    if jax.process_count() > 1:
        return f"one process has all GPUs, this is one of {jax.process_count()}"
    if jax.device_count() > _DEVICES:
        return f"it serves up to {_DEVICES} GPUs, these are {jax.device_count()}"
    return None


def _why_not_mosaic(case: Case) -> str | None:
    if reason := why_not_peers(case.target):
        return reason
    if not mosaic_sm90.suits(case.shape, jax.numpy.dtype(case.dtype).itemsize):
        least = mosaic_sm90.LEAST_BYTES
        return f"a layer's shard has {least} bytes or more, in sixteens, this is {case.dtype} {case.shape[1:]}"
    return None


def _mosaic(stacks: Sequence[Array], layer: Int[Array, ""], axis_name: str) -> list[Array]:
    return mosaic_sm90.gather(stacks, layer, axis_name=axis_name)


def _xla(stacks: Sequence[Array], layer: Int[Array, ""], axis_name: str) -> list[Array]:
    shards = [lax.dynamic_index_in_dim(stack, layer, keepdims=False) for stack in stacks]
    return [lax.all_gather(shard, axis_name, tiled=True) for shard in shards]


REGISTRY: Registry[Case] = Registry(
    "shard_gather.gather",
    {"mosaic": Implementation(_why_not_mosaic, _mosaic), "xla": Implementation(lambda _: None, _xla)},
    lambda _: ("mosaic", "xla"),
)
