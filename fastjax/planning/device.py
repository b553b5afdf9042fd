"""The device that a step is compiled for: a card that is not there (`aot`), or this machine's own."""

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from fastjax.errors import ConfigError
from fastjax.planning.aot import AOT
from pallas_kernels.cards import CARDS, Card

#: Share of the card's memory that JAX's allocator takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
ALLOCATOR_SHARE = 0.75
#: Bytes of the host's memory that are taken to be there for a card that is elsewhere.
HOST_BYTES = 128e9
#: Bytes of pinned host memory that XLA takes for a device, unless `_PINNED` in the environment says how many GiB.
PINNED_BYTES = 64 * 2**30
_PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class Device(Protocol):
    """A device that steps are compiled for."""

    @property
    def card(self) -> Card:
        """Its facts."""
        ...

    @property
    def devices(self) -> list[Any]:
        """The cards of a mesh."""
        ...

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """The context in which tracing plans for it."""
        ...

    def compile(self, jitted: Any, arguments: Any) -> Any:
        """The executable of a jitted function.

        Args:
            jitted: it, with its compiler options.
            arguments: trees of arrays or of their shapes.
        """
        ...


class Elsewhere:
    """A card that this machine does not have; products are not autotuned."""

    def __init__(self, name: str, gpus: int = 1):
        """Describe the card to the compiler.

        Args:
            name: a key of `CARDS`.
            gpus: their number.

        Raises:
            ConfigError: an unknown one, or the compiler is not installed.
        """
        self._aot = AOT(name, gpus)

    @property
    def card(self) -> Card:
        """Of the table."""
        return self._aot.card

    @property
    def devices(self) -> list[Any]:
        """Those of the topology."""
        return list(self._aot.mesh.devices.flat)

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """An abstract device of the card's kind."""
        return self._aot.abstract_device()

    def compile(self, jitted: Any, arguments: Any) -> Any:
        """With the whole compiler of the card."""

        def spec(leaf: Any) -> jax.ShapeDtypeStruct:
            kind = getattr(leaf.sharding, "memory_kind", None)
            return self._aot.spec(leaf.shape, leaf.dtype, memory_kind=kind if kind == "pinned_host" else None)

        specs = jax.tree.map(spec, arguments)
        return self._aot.compile(jitted, *specs)


class Here:
    """The GPU of this machine."""

    @property
    def card(self) -> Card:
        """Of the table.

        Raises:
            ConfigError: the GPU is not in it.
        """
        kind = jax.devices()[0].device_kind
        known = next((card for card in CARDS.values() if card.device_kind == kind), None)
        if known is None:
            raise ConfigError(f"--gpu: expected one of {', '.join(CARDS)}, since this machine's {kind} is not known")
        return known

    @property
    def devices(self) -> list[Any]:
        """JAX's."""
        return jax.devices()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Tracing plans for the device anyway."""
        return contextlib.nullcontext()

    def compile(self, jitted: Any, arguments: Any) -> Any:
        """As a run compiles it."""
        return jitted.lower(*arguments).compile()


def host_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pinned_limit() -> int:
    """Bytes of the host's memory that XLA takes for a device at most."""
    given = os.environ.get(_PINNED, "")
    return int(given) * 2**30 if given.isdecimal() else PINNED_BYTES


def pinned_setting(host: float) -> str:
    """The environment variable with which XLA takes so much of the host's memory.

    Args:
        host: bytes. Far more than a step's would make XLA take up to twice as much (docs/lab/long_rows.md).
    """
    return f"{_PINNED}={math.ceil(host / 1e9) + 1}"


def memory_limit(stats: Mapping[str, int] | None) -> int | None:
    """Bytes that JAX's allocator may take of a device; None: unknown, as on a CPU.

    Args:
        stats: `jax.Device.memory_stats()`.
    """
    return (stats or {}).get("bytes_limit")
