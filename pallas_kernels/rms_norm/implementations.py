"""The implementations of a norm in a residual stream by name, in order of preference; rows are [N, E].

forward(x, weight, eps, offset) -> (normalised rows, reciprocal root mean square of each row, float32 [N, 1])
backward(x, weight, rstd, dresidual, dnormed, offset) -> (gradient of x, of the weight in float32)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.dispatch import Target, triton_or_xla
from pallas_kernels.rms_norm import config, triton, xla


class Case(NamedTuple):
    """A call and its device.

    Attributes:
        target: the device.
        rows: N.
        features: E.
        dtype: of the rows.
    """

    target: Target
    rows: int
    features: int
    dtype: DTypeLike


def _why_not_triton(case: Case) -> str | None:
    if reason := case.target.lacks((8, 0)):
        return reason
    if jnp.dtype(case.dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it computes with bfloat16, float16 or float32, not with {jnp.dtype(case.dtype)}"
    if case.features > config.MOST_FEATURES:
        return f"a program holds whole rows of at most {config.MOST_FEATURES} features, not of {case.features}"
    if case.rows * case.features >= 2**31:
        return f"its offsets are of 32 bits, and {case.rows} × {case.features} numbers have more"
    return None


def _triton_forward(x: Array, weight: Array, eps: ArrayLike, offset: float) -> tuple[Array, Array]:
    return triton.forward(x, weight, eps, offset, config.warps(x.shape[1]))


def _triton_backward(
    x: Array, weight: Array, rstd: Array, dresidual: Array, dnormed: Array, offset: float
) -> tuple[Array, Array]:
    return triton.backward(x, weight, rstd, dresidual, dnormed, offset, config.backward_config(*x.shape))


REGISTRY = triton_or_xla("rms_norm", _why_not_triton, (_triton_forward, _triton_backward), (xla.forward, xla.backward))
