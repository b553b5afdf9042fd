"""Which calls the Triton kernels serve."""

import jax.numpy as jnp

from pallas_kernels.attention.call import Call

_LARGEST = 256


def why_not(call: Call) -> str | None:
    """Why the Triton kernels cannot serve a call, in one clause, or None when they can."""
    target, q, v = call.target, call.q, call.v
    capability = target.compute_capability
    if target.platform != "cuda" or capability is None or capability < (8, 0):
        return f"the Triton kernels need an NVIDIA GPU of compute capability 8.0 or more, not {target}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the Triton kernels take bfloat16 or float16, not {q.dtype}"
    for name, size in (("queries and keys", q.shape[3]), ("values", v.shape[3])):
        if size % 8 or size > _LARGEST:
            return f"the head size of {name} must be a multiple of 8 and at most {_LARGEST}, not {size}"
    return None
