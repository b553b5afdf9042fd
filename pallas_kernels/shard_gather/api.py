"""One layer of stacks whose rows are split over devices: the public function.

Implementations, in order of preference:

- ``mosaic``: Hopper GPUs (compute capability 9.0) of one process, jax 0.11, shards of 2 KiB or more.
  Each device reads the others' memory: nobody sends, and nobody waits. The stacks have to be there on all devices when
  the first one reads, and to stay as long as the last one does, which is the caller's care: whatever makes `layer` wait
  for a collective of the program does the first, a collective behind the last use the second.
- ``xla``: everything else; a slice and an all-gather.
"""

from collections.abc import Sequence

from jaxtyping import Array, Int

from pallas_kernels import dispatch
from pallas_kernels.shard_gather.implementations import REGISTRY, Case


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
        chosen = REGISTRY.choose(Case(dispatch.target(), stack.shape, stack.dtype), implementation)
        groups.setdefault((chosen, stack.dtype.name), []).append(place)
    found: dict[int, Array] = {}
    for (chosen, _), places in groups.items():
        whole = REGISTRY[chosen].forward([stacks[place] for place in places], layer, axis_name)
        found |= zip(places, whole, strict=True)
    return [found[place] for place in range(len(stacks))]
