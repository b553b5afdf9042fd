"""The implementations of the split and the turn, by name, in order of preference.

Each is a pair of functions:

    forward(qkv, (cos, sin) or None, query_scales or None, (H, K), interleaved) -> (q, k, v)
    backward((dq, dk, dv), (cos, sin) or None, query_scales or None, interleaved, with_absmax)
        -> (dqkv, the largest magnitude for each token or None)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Target, triton_or_xla
from pallas_kernels.split_rope import triton, xla
from pallas_kernels.split_rope.config import tiles


class Case(NamedTuple):
    """A call and its device.

    Attributes:
        target: the device.
        dtype: of the product.
        heads: numbers of query heads and of key heads.
        size: of a head.
    """

    target: Target
    dtype: DTypeLike
    heads: tuple[int, int]
    size: int


def _why_not_triton(case: Case) -> str | None:
    if reason := case.target.lacks((8, 0)):
        return reason
    if jnp.dtype(case.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it serves bfloat16 and float16, not {jnp.dtype(case.dtype)}"
    if case.size % 16 or case.size > 256:
        return f"the head size must be a multiple of 16 and at most 256, not {case.size}"
    return None


def _triton_forward(qkv: Array, tables, scales: Array | None, heads: tuple[int, int], interleaved: bool):
    size = qkv.shape[-1] // (heads[0] + 2 * heads[1])
    return triton.forward(qkv, tables, scales, triton.Static(heads, interleaved, tiles(*heads, size)))


def _triton_backward(
    gradients: tuple[Array, Array, Array], tables, scales: Array | None, interleaved: bool, with_absmax: bool = False
) -> tuple[Array, Array | None]:
    heads = gradients[0].shape[2], gradients[1].shape[2]
    static = triton.Static(heads, interleaved, tiles(*heads, gradients[0].shape[3]))
    return triton.backward(gradients, tables, scales, static, with_absmax)


REGISTRY = triton_or_xla(
    "split_rope", _why_not_triton, (_triton_forward, _triton_backward), (xla.forward, xla.backward)
)
