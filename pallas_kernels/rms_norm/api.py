"""Root mean square layer normalisation (arXiv 1910.07467): the public function."""

from jaxtyping import Array, Float

from pallas_kernels.rms_norm import xla


def rms_norm(
    x: Float[Array, "*rows E"],
    weight: Float[Array, " E"],
    *,
    eps: float,
    offset: float = 0.0,
) -> Float[Array, "*rows E"]:
    """Divide each row by its root mean square and scale it: y = (weight + offset) · x / sqrt(mean(x²) + eps).

    The statistics and products are float32. As in Hugging Face's Llama, the normalised row is rounded to x's dtype
    before the scale; with an offset (Gemma's 1 + weight) the scale is applied in float32 and the result rounded once.
    The backward pass keeps x and one float32 number a row, never a float32 copy of x.

    Args:
        x: rows to normalise, any floating dtype.
        weight: the scale of each feature; a dtype of its own.
        eps: added to the mean square.
        offset: added to the scale.

    Returns:
        The normalised rows in x's dtype. Differentiable in x and weight.

    Raises:
        ValueError: the weight is not one number a feature.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must have the shape of x's last axis, {x.shape[-1:]}, got {weight.shape} for x {x.shape}"
        )
    return xla.rms_norm(x, weight, eps, offset)
