"""The gated unit between adapters in plain jax.numpy: the oracle, and by differentiation that of its gradients."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.glu import reference


def glu_lora(
    gate_up: Float[Array, "N 2F"],
    products: Float[Array, "N 2R"] | None,
    lora_B: Float[Array, "2 F R"] | None,
    down_A: Float[Array, "R F"] | None,
    *,
    activation: str,
) -> tuple[Float[Array, "N F"], Float[Array, "N R"] | None]:
    """H = activation(gate + products₀ B₀ᵀ) · (up + products₁ B₁ᵀ), and h·Aᵀ; arguments as in ``api``."""
    gate, up = jnp.split(gate_up, 2, axis=1)
    if products is not None and lora_B is not None:
        rank = lora_B.shape[-1]
        gate, up = gate + products[:, :rank] @ lora_B[0].T, up + products[:, -rank:] @ lora_B[1].T
    h = reference.glu(gate, up, activation=activation)
    return h, None if down_A is None else h @ down_A.T
