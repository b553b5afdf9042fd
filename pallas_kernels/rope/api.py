"""Rotary position embedding (arXiv 2104.09864), half-split pairs: the public function."""

from jaxtyping import Array, Float

from pallas_kernels.rope import xla


def rope(
    x: Float[Array, "B S H D"],
    cos: Float[Array, "B S D//2"],
    sin: Float[Array, "B S D//2"],
) -> Float[Array, "B S H D"]:
    """Rotate the pairs (x[d], x[d + D/2]) of each head by the angles of its position.

    With x = [x₁, x₂] split in halves: y = [x₁ · cos − x₂ · sin, x₂ · cos + x₁ · sin]. This is Hugging Face's
    ``rotate_half`` convention, whose tables hold each angle twice; here they hold it once. The products are float32.
    The backward pass is the rotation by the opposite angles and keeps the two tables alone.

    Args:
        x: queries or keys.
        cos: cosines of the angles of each position, times the scaling of attention if the model has one.
        sin: sines of the same.

    Returns:
        The rotated heads in x's dtype. Differentiable in x; the tables are constants.

    Raises:
        ValueError: the tables do not fit x.
    """
    batch, length, _, size = x.shape
    expected = (batch, length, size // 2)
    if size % 2 or cos.shape != expected or sin.shape != expected:
        raise ValueError(
            f"rope: cos and sin must have the shape (batch, length, head size / 2) = {expected} for an even head "
            f"size, got cos {cos.shape}, sin {sin.shape} for x {x.shape}"
        )
    return xla.rope(x, cos, sin)
