"""The implementations of the quantisation of rows by name, in order of preference.

forward(x) -> (codes [N, in], scales [N])
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Target, triton_or_xla
from pallas_kernels.float8 import config, triton, xla


class Case(NamedTuple):
    """A call and its device.

    Attributes:
        target: the device.
        columns: of x.
        dtype: of x.
    """

    target: Target
    columns: int
    dtype: DTypeLike


def _why_not_triton(case: Case) -> str | None:
    if reason := case.target.lacks((8, 9)):
        return reason
    if jnp.dtype(case.dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it reads bfloat16, float16 or float32, not {jnp.dtype(case.dtype)}"
    if case.columns > config.MOST_COLUMNS:
        return f"it holds rows of up to {config.MOST_COLUMNS} columns, these have {case.columns}"
    return None


def _triton(x: Array) -> tuple[Array, Array]:
    return triton.quantize_rows(x, config=config.row_config(x.shape[1]))


QUANTIZE = triton_or_xla("float8.quantize_rows", _why_not_triton, (_triton,), (xla.quantize_rows,))
