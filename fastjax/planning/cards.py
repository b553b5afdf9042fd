"""The cards that a step can be planned for: what a compiler must know of them, and what they move in a second.

Cores, shared memory and cache are those of NVIDIA's architecture papers (Blackwell, Hopper, Ampere GA100 and GA102,
Ada, Turing). The bandwidths are the data sheets', NVLink's that of cards which all have it. The memory is what CUDA
reports, a little below or above the data sheet's figure; for the L40S, L4, RTX 3090 and T4 it is rounded down. Peak
FLOP/s are in `training.flops.PEAK_FLOPS`, by `device_kind`.
"""

from typing import NamedTuple

from fastjax.errors import ConfigError

#: Share of the card's memory that JAX's allocator takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
ALLOCATOR_SHARE = 0.75
#: Bytes of the host's memory that are taken to be there for a card that is elsewhere.
HOST_BYTES = 128e9


class Card(NamedTuple):
    """One card.

    Attributes:
        device_kind: as `jax.Device.device_kind`.
        capability: CUDA compute capability.
        cores: streaming multiprocessors.
        shared_memory_per_core: bytes.
        shared_memory_per_block: bytes that a block can opt in to.
        threads_per_core: most threads of a streaming multiprocessor.
        l2_bytes: of the second-level cache.
        memory_bytes: of the device.
        bandwidth: bytes a second of the device's memory.
        host_bandwidth: bytes a second to the host's memory and back, of the bus in one direction.
        nvlink: bytes a second to other cards of the host, in one direction; None: by the bus.
    """

    device_kind: str
    capability: tuple[int, int]
    cores: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    threads_per_core: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    host_bandwidth: float
    nvlink: float | None = None

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second to other cards of the host, in one direction."""
        return self.nvlink or self.host_bandwidth


_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9  # sixteen lanes
_SM90, _SM80, _SM86, _SM75 = (
    (233472, 232448, 2048),
    (167936, 166912, 2048),
    (102400, 101376, 1536),
    (65536, 65536, 1024),
)
_MIB = 2**20

#: Name on the command line -> card.
CARDS = {
    "b200": Card("NVIDIA B200", (10, 0), 148, *_SM90, 126 * _MIB, 191502286848, 7.7e12, _PCIE_5, 900e9),
    "h200": Card("NVIDIA H200", (9, 0), 132, *_SM90, 60 * _MIB, 150109880320, 4.8e12, _PCIE_5, 450e9),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, *_SM90, 50 * _MIB, 84942979072, 3.35e12, _PCIE_5, 450e9),
    "a100-80": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, *_SM80, 40 * _MIB, 85097971712, 2.039e12, _PCIE_4, 300e9),
    "a100-40": Card("NVIDIA A100-SXM4-40GB", (8, 0), 108, *_SM80, 40 * _MIB, 42298834944, 1.555e12, _PCIE_4, 300e9),
    "l40s": Card("NVIDIA L40S", (8, 9), 142, *_SM86, 96 * _MIB, 47_600_000_000, 864e9, _PCIE_4),
    "l4": Card("NVIDIA L4", (8, 9), 58, *_SM86, 48 * _MIB, 23_600_000_000, 300e9, _PCIE_4),
    "4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 128, *_SM86, 72 * _MIB, 25393692672, 1.008e12, _PCIE_4),
    "3090": Card("NVIDIA GeForce RTX 3090", (8, 6), 82, *_SM86, 6 * _MIB, 25_300_000_000, 936e9, _PCIE_4),
    "a6000": Card("NVIDIA RTX A6000", (8, 6), 84, *_SM86, 6 * _MIB, 51041271808, 768e9, _PCIE_4),
    "t4": Card("Tesla T4", (7, 5), 40, *_SM75, 4 * _MIB, 15_800_000_000, 320e9, _PCIE_3),
}


def card_of(device_kind: str) -> Card:
    """The card of a device on this machine.

    Args:
        device_kind: `jax.Device.device_kind`.

    Raises:
        ConfigError: it is not in the table.
    """
    for card in CARDS.values():
        if card.device_kind == device_kind:
            return card
    raise ConfigError(f"--gpu: expected one of {', '.join(CARDS)}, since this machine's {device_kind} is not known")
