"""Compile jitted functions for NVIDIA GPUs on a machine without one.

The whole XLA, Mosaic, Triton and ptxas pipeline runs; only GEMMs are not autotuned. It needs the wheels
jax-cuda13-plugin and jax-cuda13-pjrt of jax's own version (pip install --no-deps) and JAX_PLATFORMS=cpu.

    aot = AOT()                                     # one H200; AOT(gpus=4), AOT("b200"), AOT("a100"), AOT("rtx4090")
    x = aot.spec((4096, 4096), jnp.bfloat16)
    compiled = aot.compile(lambda x: x @ x, x)      # an XLA executable: .memory_analysis(), .as_text()

`targets/` holds the description of an H200 as XLA dumps it on the card, one for each supported jax; other cards are
derived from it by the few fields that matter to a compiler. `dispatch.target()` sees the card while `compile` traces.
"""

import contextlib
import importlib.util
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

_TARGETS = pathlib.Path(__file__).parent / "targets"


class Card(NamedTuple):
    """A card's differences from the H200 for the compilers."""

    name: str
    capability: tuple[int, int]
    cores: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    l2_bytes: int
    memory_bytes: int


CARDS = {
    "h200": Card("NVIDIA H200", (9, 0), 132, 233472, 232448, 62914560, 150109880320),
    "b200": Card("NVIDIA B200", (10, 0), 148, 233472, 232448, 132644864, 191502286848),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 166912, 41943040, 85097971712),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 102400, 101376, 75497472, 25393692672),
}

needs_cuda_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or jax.default_backend() != "cpu",
    reason="needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt, and JAX_PLATFORMS=cpu",
)


def target_config(card: str = "h200") -> str:
    """XLA's description of a card, as text protobuf for the running jax."""
    world = "jax010" if tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 11) else "jax011"
    text = (_TARGETS / f"h200_{world}.txtpb").read_text()
    if card == "h200":
        return text
    described = CARDS[card]
    major, minor = described.capability
    fields = {
        "core_count": described.cores,
        "shared_memory_per_core": described.shared_memory_per_core,
        "shared_memory_per_block_optin": described.shared_memory_per_block,
        "l2_cache_size": described.l2_bytes,
        "device_memory_size": described.memory_bytes,
        "platform_version": f'"Compute Capability {major}.{minor}"',
        "name": f'"{described.name}"',
        "device_description_str": f'"{described.name}"',
    }
    for field, value in fields.items():
        text = re.sub(rf"\b{field}: .*", f"{field}: {value}", text)
    text = re.sub(r"\n +model_str: .*", "", text)
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return re.sub(r"cuda_compute_capability \{[^}]*\}", capability, text)


class AOT:
    """Compiles for `gpus` cards of one kind."""

    def __init__(self, card: str = "h200", gpus: int = 1):
        self.card = CARDS[card]
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(card), topology=f"1x1x{gpus}"
        )
        self.mesh = topologies.make_mesh(topo=topology, mesh_shape=(gpus,), axis_names=("x",))

    @contextlib.contextmanager
    def abstract_device(self) -> Iterator[None]:
        """The context in which tracing plans for the card."""
        device = AbstractDevice(device_kind=self.card.name, num_cores=self.card.cores, platform="cuda")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield

    def spec(self, shape, dtype, partition=None, memory_kind=None) -> jax.ShapeDtypeStruct:
        """An argument of the compiled function, on the cards."""
        kind = {} if memory_kind is None else {"memory_kind": memory_kind}
        sharding = NamedSharding(self.mesh, partition or PartitionSpec(), **kind)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def lower(self, function, *specs):
        """Trace and lower for the card; a function that is not jitted yet is jitted."""
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        with self.abstract_device():
            return jitted.trace(*specs).lower()

    def compile(self, function, *specs, options=None):
        """The XLA executable for the card: .memory_analysis(), .as_text(), .cost_analysis()."""
        return self.lower(function, *specs).compile(compiler_options=options or {})
