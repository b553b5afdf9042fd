"""Gated linear units (arXiv 2002.05202): the public function."""

from jaxtyping import Array, Float

from pallas_kernels.glu import xla
from pallas_kernels.glu.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "glu"]


def glu(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"],
    *,
    activation: str,
) -> Float[Array, "*rows F"]:
    """activation(gate) · up, in float32 inside and rounded once.

    The backward pass keeps gate and up and computes the activation again.

    Args:
        gate: operand of the activation.
        up: the other factor; same shape and dtype.
        activation: one of ``ACTIVATIONS``; the names are those of ``hidden_act`` in Hugging Face configs.

    Returns:
        The product in gate's dtype. Differentiable in both.

    Raises:
        ValueError: an unknown activation, or operands that differ in shape or dtype.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu: activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {activation!r}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "glu: gate and up must have the same shape and dtype, "
            f"got {gate.dtype}{list(gate.shape)} and {up.dtype}{list(up.shape)}"
        )
    return xla.glu(gate, up, activation)
