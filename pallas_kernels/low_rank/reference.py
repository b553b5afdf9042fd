"""The sum with low-rank products in plain jax.numpy: the oracle, and by differentiation that of its gradients."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def low_rank_sum(
    residual: Float[Array, "N F"],
    base: Float[Array, "N F"],
    x: Float[Array, "N E"],
    lora_A: Float[Array, "PR E"],
    lora_B: Float[Array, "F R"],
    *,
    parts: tuple[int, ...],
) -> Float[Array, "N F"]:
    """Residual + base + (x·Aᵀ)·Bᵀ, part by part; arguments as in ``api``, and x with its A of all parts."""
    outputs, start, rank = [], 0, lora_B.shape[1]
    for number, part in enumerate(parts):
        products = x @ lora_A[number * rank : (number + 1) * rank].T
        outputs.append(products @ lora_B[start : start + part].T)
        start += part
    return residual + base + jnp.concatenate(outputs, axis=1)
