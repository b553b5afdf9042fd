"""The gated unit between adapters for XLA, on every device; arguments as in `api`."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8.api import quantize_rows
from pallas_kernels.float8.scaled import Rounded, Scaled, product_of, scaled_values
from pallas_kernels.glu.reference import ACTIVATIONS
from pallas_kernels.low_rank.xla import dot


def forward(
    gate_up: Array | Scaled,
    products: Array | None,
    lora_B: Array | None,
    down_A: Array | None,
    activation: str,
    rounded: bool = False,
) -> tuple[Array | Rounded, Array | None]:
    """H; h·Aᵀ or None."""
    gate, up = _halves(scaled_values(gate_up), products, lora_B)
    h = (ACTIVATIONS[activation](gate) * up).astype(product_of(gate_up).dtype)
    through = None if down_A is None else dot(h, down_A, ((1,), (1,)))
    return quantize_rows(h) if rounded else h, through


def backward(
    gate_up: Array | Scaled,
    products: Array | None,
    lora_B: Array | None,
    dh: Array | Scaled,
    down_A: Array | None,
    dproducts: Array | None,
    activation: str,
    with_h: bool = False,
    with_absmax: bool = False,
):
    """The gradients of gate and up, h or None, the gradients of B or None, of A or None, absmax or None."""
    dtype, dh = product_of(dh).dtype, scaled_values(dh)
    gate, up = _halves(scaled_values(gate_up), products, lora_B)
    if down_A is not None and dproducts is not None:
        dh = dh + dot(dproducts, down_A, ((1,), (0,))).astype(jnp.float32)
    activated, pullback = jax.vjp(ACTIVATIONS[activation], gate)
    (dgate,) = pullback(dh * up)
    dgate_up = jnp.concatenate([dgate, dh * activated], axis=1).astype(dtype)
    h = (activated * up).astype(dtype)
    dB = dA = None
    if products is not None and lora_B is not None:
        features, rank = lora_B.shape[1:]
        sums = dot(dgate_up, products, ((0,), (0,)), jnp.float32)
        dB = jnp.stack([sums[:features, :rank], sums[features:, -rank:]])
    if dproducts is not None:
        dA = dot(dproducts, h, ((0,), (0,)), jnp.float32)
    absmax = jnp.max(jnp.abs(dgate_up), axis=1).astype(jnp.float32) if with_absmax else None
    return dgate_up, h if with_h else None, dB, dA, absmax


def _halves(values: Array, products: Array | None, lora_B: Array | None) -> tuple[Array, Array]:
    """Gate and up with their adapters' sums, float32."""
    if products is not None and lora_B is not None:
        rank = lora_B.shape[-1]
        halves = products[:, :rank], products[:, -rank:]
        parts = [dot(product, b, ((1,), (1,))) for product, b in zip(halves, lora_B, strict=True)]
        values = values + jnp.concatenate(parts, axis=1).astype(jnp.float32)
    gate, up = jnp.split(values, 2, axis=1)
    return gate, up
