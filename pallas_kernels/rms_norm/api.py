"""Root mean square layer normalisation (arXiv 1910.07467): the public functions.

The implementations of the norm in a residual stream, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more; each array is read once;
- ``xla``: everything else.
"""

import math

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import FLOATS, Implementation, Target, triton_or_xla
from pallas_kernels.rms_norm import config, triton, xla
from pallas_kernels.transformations import custom_vjp, number


def rms_norm(
    x: Float[Array, "*rows E"],
    weight: Float[Array, " E"],
    *,
    eps: ArrayLike,
    offset: float = 0.0,
) -> Float[Array, "*rows E"]:
    """Divide each row by its root mean square and scale it: y = (weight + offset) · x / sqrt(mean(x²) + eps).

    The statistics and products are float32. As in Hugging Face's Llama, the normalised row is rounded to x's dtype
    before the scale; with an offset (Gemma's 1 + weight) the scale is applied in float32 and the result rounded once.
    The backward pass keeps x and one float32 number a row, never a float32 copy of x.

    Args:
        x: rows to normalise, any floating dtype.
        weight: the scale of each feature; a dtype of its own.
        eps: added to the mean square; a number or an array of one, traced or not. A constant: it has no gradient.
        offset: added to the scale; a number that is known while the function is traced.

    Returns:
        The normalised rows in x's dtype. Differentiable in x and weight.

    Raises:
        ValueError: the weight is not one number a feature, or eps not one number.
    """
    _check("rms_norm", x, weight, eps)
    offset = number("rms_norm", "offset", offset)
    return xla.rms_norm(x, weight, eps, offset)


def rms_norm_in_stream(
    x: Float[Array, "*rows E"],
    weight: Float[Array, " E"],
    *,
    eps: ArrayLike,
    offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows E"], Float[Array, "*rows E"]]:
    """x, to be read in its place, and `rms_norm` of it.

    Checkpoint policies know the reciprocal root mean squares that the backward pass reads as "rstd".

    Where x is a residual stream its gradient has two parts, beside the norm and through it. As x is handed through, the
    pass that makes the one adds the other, in float32.

    Args:
        x: as of `rms_norm`.
        weight: as of `rms_norm`.
        eps: as of `rms_norm`.
        offset: as of `rms_norm`.
        implementation: None, "triton" or "xla".

    Returns:
        x; the normalised rows in x's dtype. Differentiable in x and weight.

    Raises:
        ValueError: the weight is not one number a feature, or eps not one number.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    _check("rms_norm_in_stream", x, weight, eps)
    offset = number("rms_norm_in_stream", "offset", offset)
    rows = math.prod(x.shape[:-1])
    chosen = REGISTRY.choose(implementation, rows=rows, features=x.shape[-1], dtype=x.dtype)
    return _in_stream(x, weight, eps, offset, chosen)


def _why_not_triton(_: Target, rows: int, features: int, **facts) -> str | None:
    if features > config.MOST_FEATURES:
        return f"a program holds whole rows of at most {config.MOST_FEATURES} features, not of {features}"
    if rows * features >= 2**31:
        return f"its offsets are of 32 bits, and {rows} × {features} numbers have more"
    return None


#: Of a norm in a residual stream; rows are [N, E].
#: forward(x, weight, eps, offset) -> (normalised rows, reciprocal root mean square of each row, float32 [N, 1])
#: backward(x, weight, rstd, dresidual, dnormed, offset) -> (gradient of x, of the weight in float32)
REGISTRY = triton_or_xla(
    "rms_norm",
    Implementation(triton.forward, triton.backward, dtypes=FLOATS, why_not=_why_not_triton),
    Implementation(xla.forward, xla.backward),
)


@custom_vjp(nondiff_argnums=(3, 4))
def _in_stream(x: Array, weight: Array, eps: ArrayLike, offset: float, chosen: str) -> tuple[Array, Array]:
    return _forward(x, weight, eps, offset, chosen)[0]


def _forward(x: Array, weight: Array, eps: ArrayLike, offset: float, chosen: str) -> tuple[tuple[Array, Array], tuple]:
    normed, rstd = REGISTRY[chosen].forward(x.reshape(-1, x.shape[-1]), weight, eps, offset)
    return (x, normed.reshape(x.shape)), (x, weight, checkpoint_name(rstd, "rstd"))


def _backward(offset: float, chosen: str, residuals: tuple, gradients: tuple[Array, Array]) -> tuple:
    x, weight, rstd = residuals
    rows, dresidual, dnormed = (array.reshape(-1, x.shape[-1]) for array in (x, *gradients))
    dx, dweight = REGISTRY[chosen].backward(rows, weight, rstd, dresidual, dnormed, offset)
    return dx.reshape(x.shape), dweight.astype(weight.dtype), None


_in_stream.defvjp(_forward, _backward)


def _check(op: str, x: Array, weight: Array, eps: ArrayLike) -> None:
    if jnp.shape(eps) != ():
        raise ValueError(f"{op}: eps must be one number, got {jnp.shape(eps)}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight must have the shape of x's last axis, {x.shape[-1:]}, got {weight.shape} for x {x.shape}"
        )
