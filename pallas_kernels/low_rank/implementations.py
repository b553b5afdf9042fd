"""The implementations of the sums with low-rank products and of their gradients, by name, in order of preference.

ADD:     forward(residual, base, products, lora_B, parts) -> sum
OUTPUT:  forward(dy, products, lora_B, parts, absmax) -> (gradient of products, of lora_B, dy in float8 or None)
INPUT:   forward(dx, x, dproducts, lora_A) -> (gradient of x, of lora_A)
ROUND:   forward(dy, absmax, lora_B, parts) -> (gradient of products, dy in float8)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Target, compute_capability, triton_or_xla
from pallas_kernels.float8.scaled import Rounded, Scaled
from pallas_kernels.low_rank import config, rounding, triton, xla
from pallas_kernels.tiles import RANKS


class Case(NamedTuple):
    """A call and its device.

    Attributes:
        target: the device.
        rows: N.
        parts: columns of each part.
        dtype: of all operands.
        rank: of a part.
        float8: whether rows are written in it.
    """

    target: Target
    rows: int
    parts: tuple[int, ...]
    dtype: DTypeLike
    rank: int
    float8: bool = False


def _why_not_triton(case: Case) -> str | None:
    if reason := case.target.lacks((8, 0)):
        return reason
    if case.float8 and (reason := case.target.lacks((8, 9), what="float8")):
        return reason
    if jnp.dtype(case.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes with bfloat16 or float16, not with {jnp.dtype(case.dtype)}"
    if case.rank not in RANKS:
        return f"it serves ranks {list(RANKS)}, not {case.rank}"
    if case.rows % config.TILE or any(part % config.TILE for part in case.parts):
        return f"it takes whole tiles of {config.TILE}, not {case.rows} tokens by {list(case.parts)} features"
    return None


def _why_not_triton_output(case: Case) -> str | None:
    if reason := _why_not_triton(case):
        return reason
    if case.rank > config.LARGEST_OUTPUT_RANK:
        return f"beyond rank {config.LARGEST_OUTPUT_RANK} its partial sums cost more than a second pass over dy"
    return None


def _triton_add(
    residual: Array | None, base: Array | Scaled, products: Array, lora_B: Array, parts: tuple[int, ...]
) -> Array:
    return triton.add(residual, base, products, lora_B, parts, config.add_config(lora_B.shape[1]))


def _triton_output(
    dy: Array, products: Array, lora_B: Array, parts: tuple[int, ...], absmax: Array | None
) -> tuple[Array, Array, Rounded | None]:
    tiles = config.output_config(compute_capability())
    return triton.output_gradients(dy, products, lora_B, parts, absmax, tiles)


def _triton_input(dx: Array, x: Array, dproducts: Array, lora_A: Array) -> tuple[Array, Array]:
    return triton.input_gradients(dx, x, dproducts, lora_A, config.input_config(compute_capability(), lora_A.shape[0]))


def _triton_round(dy: Array, absmax: Array, lora_B: Array, parts: tuple[int, ...]) -> tuple[Array, Rounded]:
    return rounding.round_rows(dy, absmax, lora_B, parts, config.round_config(lora_B.shape[1]))


ADD = triton_or_xla("low_rank.add", _why_not_triton, (_triton_add,), (xla.add,))

OUTPUT = triton_or_xla("low_rank.output_gradients", _why_not_triton_output, (_triton_output,), (xla.output_gradients,))

INPUT = triton_or_xla("low_rank.input_gradients", _why_not_triton, (_triton_input,), (xla.input_gradients,))

ROUND = triton_or_xla("low_rank.round_rows", _why_not_triton, (_triton_round,), (xla.round_rows,))
