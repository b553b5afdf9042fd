"""Rotary position embedding (arXiv 2104.09864) for XLA's fusions.

Autodiff of the plain formula keeps the tables broadcast over the heads in float32. A rotation's transpose is the
rotation by the opposite angle, so the backward pass here is the forward one with −sin, and keeps the tables as given.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.transformations import custom_vjp


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
    return turn(x, cos, sin, interleaved)


def check_tables(op: str, cos: Array, sin: Array, heads: tuple[int, int, int]) -> None:
    """Raise ValueError unless the tables fit.

    Args:
        op: the operation's name, for the message.
        cos: as in `rope`.
        sin: as in `rope`.
        heads: (batch, length, head size).
    """
    batch, length, size = heads
    if cos.shape != sin.shape or cos.ndim != 3 or cos.shape[:2] != (batch, length) or 2 * cos.shape[2] > size:
        raise ValueError(
            f"{op}: cos and sin must have the shape (batch, length, half of the features that turn), at most "
            f"{(batch, length, size // 2)} for a head size of {size}, got cos {cos.shape}, sin {sin.shape}"
        )


@custom_vjp(nondiff_argnums=(3,))
def turn(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """``rope`` without its checks."""
    half = cos.shape[-1]
    turned = x[..., : 2 * half]
    if interleaved:
        turned = turned.reshape(*x.shape[:3], half, 2).swapaxes(-1, -2).reshape(turned.shape)
    return _joined(_rotate(turned, cos, sin), x)


def transpose(dy: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """The gradient of x from that of ``turn``."""
    half = cos.shape[-1]
    turned = _rotate(dy[..., : 2 * half], cos, -sin)
    if interleaved:
        turned = turned.reshape(*dy.shape[:3], 2, half).swapaxes(-1, -2).reshape(turned.shape)
    return _joined(turned, dy)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos.astype(jnp.float32)[:, :, None, :], sin.astype(jnp.float32)[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _joined(turned: Array, x: Array) -> Array:
    """The turned features, and those of x behind them."""
    size = turned.shape[-1]
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def _forward(x: Array, cos: Array, sin: Array, interleaved: bool) -> tuple[Array, tuple[Array, Array]]:
    return turn(x, cos, sin, interleaved), (cos, sin)


def _backward(interleaved: bool, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    return transpose(dy, *residuals, interleaved), None, None


turn.defvjp(_forward, _backward)
