"""The mesh, and the one table of arrays' places on it.

Axes: `data` splits the batch and replicates the weights; `fsdp` splits the batch and the weights (by experts or output
rows, so that packed codes travel packed), with a trained one its gradient and its optimizer state; `expert` splits the
batch and a mixture's experts; `context` splits rows of tokens; `tensor` splits heads and features. A weight names its
arrays' logical axes (`quantization.Weight.axes`); `MESH_AXES` places these.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.errors import ConfigError
from fastjax.parallel.islands import BATCH, on_axes

#: Logical axis -> mesh axes, the one that splits first in front; none: on every device. Inputs have axes of their own
#: (`as_input`): a mesh axis splits one axis of an array, the first that it divides. Of experts that is their own: parts
#: of an inner axis would be gathered in another layout, for which XLA turns the whole stack of layers round at once.
MESH_AXES: dict[str, tuple[str, ...]] = {
    "layer": (),
    "expert": ("expert", "fsdp"),
    "vocabulary": ("fsdp",),
    "embed": ("fsdp",),
    "heads": ("tensor", "fsdp"),
    "key_heads": ("tensor", "fsdp"),
    "mlp": ("tensor", "fsdp"),
    "expert_mlp": ("fsdp",),
    "latent": ("fsdp",),
    "state": ("fsdp",),
    "embed input": (),
    "heads input": ("tensor",),
    "mlp input": ("tensor",),
    "expert_mlp input": (),
    "latent input": (),
    "state input": (),
    "adapter": ("fsdp",),
}
#: Fewest rows of a part on one device, but of experts; smaller arrays are replicated.
MIN_ROWS = 8


class MeshShape(NamedTuple):
    """Devices along each mesh axis; the last lie next to each other.

    Attributes:
        data: replicas.
        fsdp: devices that share one copy of the frozen weights.
        expert: devices that share one copy of a mixture's experts.
        context: devices that share a row's tokens.
        tensor: devices that share each layer's heads and features.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self._asdict().items() if size != 1) or "one device"

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(self)

    @property
    def token_parts(self) -> int:
        """Equal parts that a row's tokens are cut into: two for each device along `context`, one along `tensor`."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)

    @property
    def replicas(self) -> int:
        """The parts in which a batch's rows lie on the devices."""
        return math.prod(getattr(self, name) for name in BATCH)


def make_mesh(*sizes: int, devices: list[Any] | None = None, **axes: int) -> Mesh:
    """A mesh of devices with all axes, of which any may have size one.

    Args:
        sizes: of the axes, as in `MeshShape`.
        devices: the first of these; default: of `jax.devices()`.
        axes: sizes by name.

    Raises:
        ConfigError: more devices requested than exist.
    """
    devices = jax.devices() if devices is None else devices
    shape = MeshShape(*sizes, **axes)
    if min(shape) < 1 or shape.size > len(devices):
        asked = " × ".join(f"{name} {size}" for name, size in shape._asdict().items())
        raise ConfigError(f"mesh: {asked} needs {shape.size} devices, there are {len(devices)}")
    grid = np.asarray(devices[: shape.size]).reshape(shape)
    return Mesh(grid, MeshShape._fields, axis_types=(AxisType.Auto,) * len(shape))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch's arrays [A, B, …]: rows over `BATCH`, each whole (`tokens.own_tokens`)."""
    return NamedSharding(mesh, P(None, on_axes(BATCH, mesh)))


def as_input(axis: str) -> str:
    """The name of a logical axis as a matrix's input."""
    return f"{axis} input"


def shard_frozen(tree: Any, axes: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of a tree of weights, frozen or trained.

    Args:
        tree: arrays, or their shapes.
        axes: for every leaf a PartitionSpec of logical axes, keys of `MESH_AXES`; None: replicated.
        mesh: the mesh. An axis that it does not divide, or into parts of fewer than `MIN_ROWS` rows, is replicated.
    """
    return jax.tree.map(lambda leaf, names: NamedSharding(mesh, spec_of(leaf.shape, names, mesh)), tree, axes)


def spec_of(shape: tuple[int, ...], names: P, mesh: Any) -> P:
    """The mesh axes of one array of `shard_frozen`.

    Args:
        shape: of the array.
        names: its logical axes.
        mesh: the mesh, or its abstract.
    """
    taken: set[str] = set()
    splitting = [_splitting(*axis, mesh, taken) for axis in zip(shape, names, strict=True)]
    return P(*splitting) if taken else P()


def _splitting(size: int, name: str | None, mesh: Any, taken: set[str]) -> str | tuple[str, ...] | None:
    """The mesh axes, among an array axis' own and not taken, that split it into parts of enough rows; taken now."""
    splitting, devices = [], 1
    for axis in () if name is None else MESH_AXES[name]:
        more = devices * mesh.shape[axis]
        least = 1 if name == "expert" else MIN_ROWS
        if axis not in taken and more > devices and size % more == 0 and size >= least * more:
            splitting.append(axis)
            devices = more
    taken.update(splitting)
    return tuple(splitting) if len(splitting) > 1 else splitting[0] if splitting else None
