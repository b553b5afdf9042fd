"""Attention in Pallas-Triton, for NVIDIA GPUs from Ampere on: FlashAttention-2 (arXiv 2307.08691) with every option."""

from pallas_kernels.attention.call import Call
from pallas_kernels.attention.triton.backward import backward
from pallas_kernels.attention.triton.forward import forward
from pallas_kernels.dispatch import Target

__all__ = ["backward", "forward", "why_not"]

_LARGEST = 256


def why_not(_: Target, call: Call) -> str | None:
    """Why the kernels cannot serve a call of 16-bit operands, in one clause, or None when they can."""
    for name, size in (("queries and keys", call.q.shape[3]), ("values", call.v.shape[3])):
        if size % 8 or size > _LARGEST:
            return f"the head size of {name} must be a multiple of 8 and at most {_LARGEST}, not {size}"
    return None
