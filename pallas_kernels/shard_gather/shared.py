"""Arrays that stay where they are until a kernel reads them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.shard_gather.api import gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """One layer's array of which each device has some rows, in an island over a mesh axis.

    A kernel that reads other devices' memory takes it as it is; `whole` gathers it for the others. What `gather` says
    of its stacks holds until the last use.

    Attributes:
        stack: this device's rows, [L, n, …] of all layers.
        layer: index into them, int32.
        axis_name: of the mesh axis.
        devices: along it.
    """

    stack: Array
    layer: Int[Array, ""]
    axis_name: str = dataclasses.field(metadata={"static": True})
    devices: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        rows, *rest = self.stack.shape[1:]
        return (self.devices * rows, *rest)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of its elements."""
        return self.stack.dtype


def whole(array: Array | Shared) -> Array:
    """The array on every device; itself where it is there.

    Args:
        array: either.
    """
    if not isinstance(array, Shared):
        return array
    [gathered] = gather([array.stack], array.layer, array.axis_name)
    return gathered
