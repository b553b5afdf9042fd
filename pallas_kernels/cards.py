"""NVIDIA's cards: compute capability, peak rates, and what a compiler and a plan must know of one that is not there.

Cores, shared memory and cache are those of NVIDIA's architecture papers (Blackwell, Hopper, Ampere GA100 and GA102,
Ada, Turing). The bandwidths are the data sheets', NVLink's that of cards which all have it. The memory is what CUDA
reports, a little below or above the data sheet's figure; for the L40S, L4, RTX 3090 and T4 it is rounded down.
"""

import re
from typing import Any, NamedTuple

import numpy as np

# NVIDIA product names as `device_kind` gives them, in the order in which they are tried (GB200 before B200).
_CAPABILITIES: tuple[tuple[str, tuple[int, int]], ...] = (
    (r"GB10\b", (12, 1)),
    (r"RTX PRO [0-9]+|RTX 50[0-9]0", (12, 0)),
    (r"G?B300", (10, 3)),
    (r"G?B200", (10, 0)),
    (r"GH200|H200|H100|H800|H20\b", (9, 0)),
    (r"RTX 40[0-9]0|L40S?\b|L4\b|L20\b|RTX [0-9]+ ADA|RTX [0-9]+ Ada", (8, 9)),
    (r"RTX 30[0-9]0|A10G?\b|A40\b|A16\b|A2\b|RTX A[0-9]+", (8, 6)),
    (r"A100|A800|A30\b", (8, 0)),
    (r"T4\b|RTX 20[0-9]0|Quadro RTX", (7, 5)),
    (r"V100|TITAN V", (7, 0)),
)


class PeakFlops(NamedTuple):
    """Peak dense FLOP/s of one device.

    Attributes:
        half: bfloat16 and float16 matrices with accumulation in float32.
        tf32: float32 matrices rounded to TF32; None where the device has none.
        float32: float32 without tensor cores.
        bfloat16: whether `half` holds for bfloat16 too; Turing has float16 only.
        float8: float8 matrices with accumulation in float32; None where the device has none.
    """

    half: float
    tf32: float | None
    float32: float
    bfloat16: bool = True
    float8: float | None = None


class Card(NamedTuple):
    """One card.

    Attributes:
        device_kind: as `jax.Device.device_kind`.
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
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability."""
        capability = compute_capability_of(self.device_kind)
        assert capability is not None, f"{self.device_kind} has a pattern in the table"
        return capability

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second to other cards of the host, in one direction."""
        return self.nvlink or self.host_bandwidth


_H100_SXM = PeakFlops(
    989.4e12, 494.7e12, 66.9e12, float8=1978.9e12
)  # NVIDIA H100 Tensor Core GPU Architecture, table of peak rates
_H100_PCIE = PeakFlops(756e12, 378e12, 51.2e12, float8=1513e12)  # the same table
_H100_NVL = PeakFlops(835.5e12, 417.5e12, 60e12, float8=1670.5e12)  # H100 data sheet: 1,671, 835, 3,341 (sparse), 60
_A100 = PeakFlops(312e12, 156e12, 19.5e12)  # NVIDIA A100 Tensor Core GPU Architecture, table 1

PEAK_FLOPS: dict[str, PeakFlops] = {
    "NVIDIA B200": PeakFlops(
        2250e12, 1125e12, 75e12, float8=4500e12
    ),  # HGX B200: 36,000, 18,000, 72,000 (of eight, sparse), 600
    "NVIDIA H200": _H100_SXM,  # H200 data sheet: the processor of the H100 SXM
    "NVIDIA H200 NVL": _H100_NVL,  # H200 data sheet, the same figures
    "NVIDIA GH200 480GB": _H100_SXM,  # GH200 data sheet, the same figures
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A40": PeakFlops(149.7e12, 74.8e12, 37.4e12),  # A40 data sheet
    "NVIDIA A30": PeakFlops(165e12, 82e12, 10.3e12),  # A30 data sheet
    "NVIDIA A10": PeakFlops(125e12, 62.5e12, 31.2e12),  # A10 data sheet
    "NVIDIA RTX A6000": PeakFlops(154.8e12, 77.4e12, 38.7e12),  # GA102 GPU Architecture, appendix
    "NVIDIA GeForce RTX 3090": PeakFlops(71e12, 35.6e12, 35.6e12),  # GA102 GPU Architecture, table 2
    "NVIDIA L40S": PeakFlops(362e12, 183e12, 91.6e12, float8=733e12),  # L40S data sheet
    "NVIDIA L40": PeakFlops(181e12, 90.5e12, 90.5e12, float8=362e12),  # L40 data sheet
    "NVIDIA L4": PeakFlops(
        121e12, 60e12, 30.3e12, float8=242.5e12
    ),  # L4 data sheet: 242, 120, 485 (with sparsity), 30.3
    "NVIDIA RTX 6000 Ada Generation": PeakFlops(364.2e12, 182.1e12, 91.1e12, float8=728.5e12),  # its data sheet
    "NVIDIA GeForce RTX 4090": PeakFlops(
        165.2e12, 82.6e12, 82.6e12, float8=330.3e12
    ),  # Ada GPU Architecture, appendix A
    "Tesla T4": PeakFlops(65e12, None, 8.1e12, bfloat16=False),  # T4 data sheet
}
"""As NVIDIA states them, by `jax.Device.device_kind`; a part of a GPU (MIG) has a name of its own and is not listed."""

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
    "b200": Card("NVIDIA B200", 148, *_SM90, 126 * _MIB, 191502286848, 7.7e12, _PCIE_5, 900e9),
    "h200": Card("NVIDIA H200", 132, *_SM90, 60 * _MIB, 150109880320, 4.8e12, _PCIE_5, 450e9),
    "h100": Card("NVIDIA H100 80GB HBM3", 132, *_SM90, 50 * _MIB, 84942979072, 3.35e12, _PCIE_5, 450e9),
    "a100-80": Card("NVIDIA A100-SXM4-80GB", 108, *_SM80, 40 * _MIB, 85097971712, 2.039e12, _PCIE_4, 300e9),
    "a100-40": Card("NVIDIA A100-SXM4-40GB", 108, *_SM80, 40 * _MIB, 42298834944, 1.555e12, _PCIE_4, 300e9),
    "l40s": Card("NVIDIA L40S", 142, *_SM86, 96 * _MIB, 47_600_000_000, 864e9, _PCIE_4),
    "l4": Card("NVIDIA L4", 58, *_SM86, 48 * _MIB, 23_600_000_000, 300e9, _PCIE_4),
    "4090": Card("NVIDIA GeForce RTX 4090", 128, *_SM86, 72 * _MIB, 25393692672, 1.008e12, _PCIE_4),
    "3090": Card("NVIDIA GeForce RTX 3090", 82, *_SM86, 6 * _MIB, 25_300_000_000, 936e9, _PCIE_4),
    "a6000": Card("NVIDIA RTX A6000", 84, *_SM86, 6 * _MIB, 51041271808, 768e9, _PCIE_4),
    "t4": Card("Tesla T4", 40, *_SM75, 4 * _MIB, 15_800_000_000, 320e9, _PCIE_3),
}


def compute_capability_of(device_kind: str) -> tuple[int, int] | None:
    """The CUDA compute capability of an NVIDIA product.

    Args:
        device_kind: product name, for example "NVIDIA A100-SXM4-80GB".

    Returns:
        (major, minor), or None for a product outside the table.

    References:
        https://developer.nvidia.com/cuda-gpus
    """
    for pattern, capability in _CAPABILITIES:
        if re.search(rf"\b(?:{pattern})", device_kind):
            return capability
    return None


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Peak FLOP/s of one device in a dtype.

    Args:
        device_kind: `jax.Device.device_kind`.
        dtype: of the products: bfloat16, float16, float32 (not rounded to anything), "tf32" or "float8".

    Returns:
        FLOP/s, dense; None: unknown.
    """
    peak = PEAK_FLOPS.get(device_kind)
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if peak is None or (name == "bfloat16" and not peak.bfloat16):
        return None
    rates = {"bfloat16": peak.half, "float16": peak.half, "tf32": peak.tf32, "float32": peak.float32}
    return (rates | {"float8": peak.float8}).get(name)
