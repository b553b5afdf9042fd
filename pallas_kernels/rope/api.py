"""Rotary position embedding (arXiv 2104.09864): the public function."""

from jaxtyping import Array, Float

from pallas_kernels.rope import xla


def rope(
    x: Float[Array, "B S H D"],
    cos: Float[Array, "B S R//2"],
    sin: Float[Array, "B S R//2"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B S H D"]:
    """Rotate the pairs (x[r], x[r + R/2]) among the first R features of each head by the angles of its position.

    With x = [x₁, x₂, rest], the first two R/2 wide: y = [x₁ · cos − x₂ · sin, x₂ · cos + x₁ · sin, rest]. This is
    Hugging Face's ``rotate_half`` convention, whose tables hold each angle twice; here they hold it once. The products
    are float32. The backward pass is the rotation by the opposite angles and keeps the two tables alone.

    Args:
        x: queries or keys.
        cos: cosines of the angles of each position, times the scaling of attention if the model has one.
        sin: sines of the same.
        interleaved: whether the pairs of x are neighbours, (x[2r], x[2r + 1]). Those of the result are R/2 apart all
            the same: in queries and keys alike, so that their products stay what they are.

    Returns:
        The rotated heads in x's dtype. Differentiable in x; the tables are constants.

    Raises:
        ValueError: the tables do not fit x.
    """
    batch, length, _, size = x.shape
    check_tables("rope", cos, sin, (batch, length, size))
    return xla.rope(x, cos, sin, interleaved)


def check_tables(op: str, cos: Array, sin: Array, heads: tuple[int, int, int]) -> None:
    """Raise ValueError unless the tables fit.

    Args:
        op: the operation's name, for the message.
        cos: as in `rope`.
        sin: likewise.
        heads: (batch, length, head size).
    """
    batch, length, size = heads
    if cos.shape != sin.shape or cos.ndim != 3 or cos.shape[:2] != (batch, length) or 2 * cos.shape[2] > size:
        raise ValueError(
            f"{op}: cos and sin must have the shape (batch, length, half of the features that turn), at most "
            f"{(batch, length, size // 2)} for a head size of {size}, got cos {cos.shape}, sin {sin.shape}"
        )
