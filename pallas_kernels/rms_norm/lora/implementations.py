"""The implementations of the two passes by name, in order of preference.

REGISTRY:  forward(x, scale, rstd, mean, lora_A, dresidual, dnormed, dproducts) -> (gradient of x, of lora_A)
ROUND:     forward(x, weight, lora_A, eps, offset) -> (normalised rows in float8, rank products, rstd)

`scale` is the weight with its offset, `mean` that of g·x·rstd.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels.dispatch import compute_capability, triton_or_xla
from pallas_kernels.float8.config import MOST_COLUMNS, row_config
from pallas_kernels.float8.scaled import Rounded
from pallas_kernels.low_rank import INPUT, Case
from pallas_kernels.rms_norm.lora import config, forward, triton, xla
from pallas_kernels.rms_norm.xla import scale_of


def _triton(*arguments) -> tuple[Array, Array]:
    tiles = config.backward_config(compute_capability(), arguments[4].shape[0])
    return triton.backward(*arguments, tiles)


def _why_not_triton_round(case: Case) -> str | None:
    if reason := INPUT.implementations["triton"].why_not(case):
        return reason
    [columns] = case.parts
    if columns > MOST_COLUMNS:
        return f"it holds rows of up to {MOST_COLUMNS} columns, these have {columns}"
    return None


def _triton_round(
    x: Array, weight: Array, lora_A: Array, eps: ArrayLike, offset: float
) -> tuple[Rounded, Array, Array]:
    rows, rstd = forward.round_rows(x, weight, eps, offset, row_config(x.shape[1]))
    scaled_A = (lora_A.astype(jnp.float32) * scale_of(weight, offset, 2)).astype(x.dtype)
    return rows, forward.products(x, rstd, scaled_A, config.products_config(lora_A.shape[0])), rstd


REGISTRY = triton_or_xla("rms_norm.lora", INPUT.implementations["triton"].why_not, (_triton,), (xla.backward,))

ROUND = triton_or_xla("rms_norm.lora_round", _why_not_triton_round, (_triton_round,), (xla.round_rows,))
