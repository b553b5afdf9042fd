"""Which calls the Triton kernels serve."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.options import Options
from pallas_kernels.dispatch import Target

_LARGEST = 256


def unsupported(
    target: Target,
    q: Array,
    k: Array,
    v: Array,
    *,
    ranges: bool,
    segments: bool,
    offset: int | str,
    sinks: bool,
    options: Options,
) -> str | None:
    """Why the Triton kernels cannot serve a call on the target, or None when they can.

    Args:
        target: the device to plan for.
        q: queries [B, S, H, D].
        k: keys [B, T, K, D].
        v: values [B, T, K, Dv].
        ranges: whether the documents are given as ranges.
        segments: whether they are given as ids.
        offset: the position of the first query among the keys, or a clause on why it is not known.
        sinks: whether there are sinks.
        options: the call's.

    Returns:
        One clause, or None.
    """
    del k, ranges, segments, offset, sinks, options
    capability = target.compute_capability
    if target.platform != "cuda" or capability is None or capability < (8, 0):
        return f"the Triton kernels need an NVIDIA GPU of compute capability 8.0 or more, not {target}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the Triton kernels take bfloat16 or float16, not {q.dtype}"
    for name, size in (("queries and keys", q.shape[3]), ("values", v.shape[3])):
        if size % 8 or size > _LARGEST:
            return f"the head size of {name} must be a multiple of 8 and at most {_LARGEST}, not {size}"
    return None
