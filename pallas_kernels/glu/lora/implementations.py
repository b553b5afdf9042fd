"""The implementations of the gated unit between adapters, by name, in order of preference.

Each is a pair of functions:

    forward(gate_up, inner, down_A, activation, rounded) -> (h, h·Aᵀ or None)
    backward(gate_up, inner, dh, down_A, dproducts, activation, with_h, with_absmax)
        -> what `api.Gradients` holds
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Target, compute_capability, triton_or_xla
from pallas_kernels.float8.config import MOST_JOINED
from pallas_kernels.float8.scaled import Scaled
from pallas_kernels.glu.lora import config, triton, xla
from pallas_kernels.tiles import RANKS


class Case(NamedTuple):
    """A call and its device.

    Attributes:
        target: the device.
        shape: of gate and up together, [N, 2F].
        dtype: theirs.
        ranks: of the adapters of gate and up, and of down; 0: none.
        activation: its name.
        float8: whether h is written in float8.
    """

    target: Target
    shape: tuple[int, ...]
    dtype: DTypeLike
    ranks: tuple[int, int]
    activation: str
    float8: bool = False


def _why_not_triton(case: Case) -> str | None:
    (rows, columns), ranks = case.shape, case.ranks
    widths = [rank for rank in ranks if rank and rank not in RANKS]
    if reason := case.target.lacks((8, 0)):
        return reason
    if case.float8 and (reason := case.target.lacks((8, 9), what="float8")):
        return reason
    if case.float8 and columns // 2 > MOST_JOINED:
        return f"a program holds rows of up to {MOST_JOINED} features in float8, these have {columns // 2}"
    if jnp.dtype(case.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes with bfloat16 or float16, not with {jnp.dtype(case.dtype)}"
    if case.activation not in config.ACTIVATIONS:
        return f"Pallas-Triton has no {case.activation}"
    most = config.largest_rank(case.target.compute_capability or (8, 0))
    if widths or max(ranks) > most:
        return f"it serves ranks {list(RANKS)} up to {most} on {case.target}, not {max(ranks)}"
    if rows % config.TILE or columns // 2 % config.TILE:
        return f"it takes whole tiles of {config.TILE}, not {rows} tokens by {columns // 2} features"
    return None


def _triton_forward(
    gate_up: Array | Scaled,
    inner: Any,
    down_A: Array | None,
    activation: str,
    rounded: bool = False,
):
    products, lora_B = (None, None) if inner is None else inner
    tiles = config.forward_config(compute_capability(), _rank(lora_B, down_A))
    return triton.forward(gate_up, products, lora_B, down_A, activation, tiles, False, rounded)


def _triton_backward(
    gate_up: Array | Scaled,
    inner: Any,
    dh: Array | Scaled,
    down_A: Array | None,
    dproducts: Array | None,
    activation: str,
    with_h: bool,
    with_absmax: bool = False,
):
    products, lora_B = (None, None) if inner is None else inner
    tiles = config.backward_config(compute_capability(), _rank(lora_B, down_A))
    return triton.backward(gate_up, products, lora_B, dh, down_A, dproducts, activation, tiles, with_h, with_absmax)


def _rank(lora_B: Array | None, down_A: Array | None) -> int:
    """The larger rank of the adapters."""
    return max(0 if lora_B is None else lora_B.shape[-1], 0 if down_A is None else down_A.shape[0])


REGISTRY = triton_or_xla("glu.lora", _why_not_triton, (_triton_forward, _triton_backward), (xla.forward, xla.backward))
