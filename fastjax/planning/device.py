"""The device that a step is compiled for: this machine's own, or a card that is not there (`aot`)."""

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any

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


class LocalDevice:
    """The GPU of this machine."""

    @property
    def card(self) -> Card:
        """Its facts.

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
        """The cards of a mesh."""
        return jax.devices()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Tracing plans for the device anyway."""
        return contextlib.nullcontext()

    def compile(self, jitted: Any, *arguments: Any) -> Any:
        """The executable of a jitted function, compiled as in a run.

        Args:
            jitted: it, with its compiler options.
            arguments: trees of arrays or of their shapes.
        """
        return jitted.lower(*arguments).compile()


Device = AOT | LocalDevice


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
