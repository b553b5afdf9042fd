"""Compile jitted functions for NVIDIA GPUs on a machine without one.

The whole XLA, Mosaic, Triton and ptxas pipeline runs; only GEMMs are not autotuned. It needs the wheels
jax-cuda13-plugin and jax-cuda13-pjrt of jax's own version.

    aot = AOT()                                     # one H200; AOT("a100-80"), AOT("4090"), AOT(gpus=4)
    x = aot.spec((4096, 4096), jnp.bfloat16)
    compiled = aot.compile(lambda x: x @ x, x)      # an XLA executable: .memory_analysis(), .as_text()

`targets/` holds the description of an H200 as XLA dumps it on the card, one for each supported jax; other cards are
derived from it by the few fields that matter to a compiler (`cards`). `dispatch.target()` sees the card while `compile`
traces.
"""

import contextlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from fastjax.errors import ConfigError
from pallas_kernels.cards import CARDS
from pallas_kernels.compat import JAX_VERSION

_TARGETS = Path(__file__).with_name("targets")


def why_not() -> str | None:
    """Why nothing can be compiled for a card here, with the way out; None: it can."""
    missing = [name for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt") if not _installed(name)]
    if not missing:
        return None
    wanted = " ".join(f"{name}=={jax.__version__}" for name in missing)
    return f"compiling for a GPU without one needs its compiler: pip install --no-deps {wanted}"


def _installed(name: str) -> bool:
    module = {"jax-cuda13-plugin": "jax_cuda13_plugin", "jax-cuda13-pjrt": "jax_plugins.xla_cuda13"}[name]
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def target_config(card: str = "h200") -> str:
    """XLA's description of a card, as text protobuf for the running jax.

    Args:
        card: a key of `CARDS`.
    """
    world = "jax010" if JAX_VERSION < (0, 11) else "jax011"
    text = (_TARGETS / f"h200_{world}.txtpb").read_text(encoding="utf-8")
    if card == "h200":
        return text
    described = CARDS[card]
    major, minor = described.capability
    fields = {
        "core_count": described.cores,
        "shared_memory_per_core": described.shared_memory_per_core,
        "shared_memory_per_block_optin": described.shared_memory_per_block,
        "threads_per_core_limit": described.threads_per_core,
        "l2_cache_size": described.l2_bytes,
        "device_memory_size": described.memory_bytes,
        "memory_bandwidth": int(described.bandwidth),
        "platform_version": f'"Compute Capability {major}.{minor}{"a" * (major == 9)}"',
        "name": f'"{described.device_kind}"',
        "device_description_str": f'"{described.device_kind}"',
    }
    for field, value in fields.items():
        text = re.sub(rf"\b{field}: .*", f"{field}: {value}", text)
    text = re.sub(r"\n +model_str: .*", "", text)
    feature = "feature_extension: ACCELERATED_FEATURES" if major == 9 else ""  # wgmma
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}"
    return re.sub(r"cuda_compute_capability \{[^}]*\}", capability, text)


class AOT:
    """Compiles for cards of one kind.

    Attributes:
        card: its facts.
        mesh: of the cards that do not exist.
    """

    def __init__(self, card: str = "h200", gpus: int = 1):
        """Describe the cards to the compiler.

        Args:
            card: a key of `CARDS`.
            gpus: their number.

        Raises:
            ConfigError: an unknown card, or the compiler's wheels are missing.
        """
        if card not in CARDS:
            raise ConfigError(f"--gpu: expected one of {', '.join(CARDS)}, got {card}")
        if (reason := why_not()) is not None:
            raise ConfigError(f"--gpu {card}: {reason}")
        self.card = CARDS[card]
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(card), topology=f"1x1x{gpus}"
        )
        self.mesh = topologies.make_mesh(topo=topology, mesh_shape=(gpus,), axis_names=("x",))

    @property
    def devices(self) -> list[Any]:
        """The cards of a mesh."""
        return list(self.mesh.devices.flat)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """The context in which tracing plans for the card."""
        device = AbstractDevice(device_kind=self.card.device_kind, num_cores=self.card.cores, platform="cuda")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield

    def spec(
        self, shape: tuple[int, ...], dtype: Any, partition: PartitionSpec | None = None, memory_kind: str | None = None
    ) -> jax.ShapeDtypeStruct:
        """An argument of the compiled function, on the cards.

        Args:
            shape: its shape.
            dtype: its dtype.
            partition: its axes over the mesh's axis "x"; None: every card has it whole.
            memory_kind: "device" or "pinned_host"; None: the device's own.
        """
        # A sharding over devices that do not exist forgets their memory; an abstract mesh has no devices to ask.
        mesh = self.mesh if memory_kind is None else self.mesh.abstract_mesh
        sharding = NamedSharding(mesh, partition or PartitionSpec(), memory_kind=memory_kind)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def lower(self, function: Any, *arguments: Any) -> Any:
        """Trace and lower for the card; a function that is not jitted yet is jitted.

        Args:
            function: pure.
            arguments: trees of `spec`'s; of arrays, or shapes, elsewhere the card gets all of each.
        """

        def on_card(leaf: Any) -> jax.ShapeDtypeStruct:
            if getattr(leaf.sharding, "mesh", None) in (self.mesh, self.mesh.abstract_mesh):
                return leaf
            in_host = getattr(leaf.sharding, "memory_kind", None) == "pinned_host"
            return self.spec(leaf.shape, leaf.dtype, memory_kind="pinned_host" if in_host else None)

        jitted = function if hasattr(function, "lower") else jax.jit(function)
        with self.tracing():
            return jitted.trace(*jax.tree.map(on_card, arguments)).lower()

    def compile(self, function: Any, *arguments: Any, options: Mapping[str, Any] | None = None) -> Any:
        """The XLA executable for the card: .memory_analysis(), .as_text().

        Args:
            function: as for `lower`.
            arguments: as for `lower`.
            options: XLA's, beside those that a jitted function has.
        """
        return self.lower(function, *arguments).compile(compiler_options=dict(options or {}))
