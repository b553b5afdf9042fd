"""The implementations of a chunk's rows of logits, by name, in order of preference.

Each is a pair of functions:

    forward(logits, targets, options) -> rows
    backward(logits, targets, options) -> (rows, gradient of the loss in the logits)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.cross_entropy import config, triton, xla
from pallas_kernels.cross_entropy.rows import Options, Rows
from pallas_kernels.dispatch import Target, triton_or_xla


class Case(NamedTuple):
    """A chunk and its device.

    Attributes:
        target: the device.
        shape: of the logits, [B, C, V].
        dtype: theirs.
    """

    target: Target
    shape: tuple[int, ...]
    dtype: DTypeLike


def _why_not_triton(case: Case) -> str | None:
    if reason := case.target.lacks((8, 0)):
        return reason
    if jnp.dtype(case.dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it computes with bfloat16, float16 or float32, not with {jnp.dtype(case.dtype)}"
    batch, length, vocab = case.shape
    if batch * length * vocab >= 2**31:
        return f"its offsets are of 32 bits, and {batch} × {length} × {vocab} logits have more"
    return None


def _triton_forward(logits: Array, targets: Array, options: Options) -> Rows:
    return triton.forward(logits, targets, options, config.TILES)


def _triton_backward(logits: Array, targets: Array, options: Options) -> tuple[Rows, Array]:
    return triton.backward(logits, targets, options, config.TILES)


REGISTRY = triton_or_xla(
    "cross_entropy", _why_not_triton, (_triton_forward, _triton_backward), (xla.forward, xla.backward)
)
