"""Attention in Pallas-Triton, for NVIDIA GPUs from Ampere on: FlashAttention-2 (arXiv 2307.08691) with every option."""

from pallas_kernels.attention.triton.backward import backward
from pallas_kernels.attention.triton.forward import forward
from pallas_kernels.attention.triton.support import why_not

__all__ = ["backward", "forward", "why_not"]
