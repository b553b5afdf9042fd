"""A norm in a residual stream before LoRA adapters (arXiv 1910.07467, 2106.09685).

The backward pass in one pass:

    n = scale · x · rstd        p = n·Aᵀ        g = (dn + dp·A) · scale        m = mean of g·x·rstd over a row
    dx = dresidual + rstd · (g − x·rstd·m)        dA = dpᵀ·n

dn is the gradient through the large product. n is made again from x where x is read, and the rank product's gradient is
applied where dn is read, so that neither is an array of its own. m is known before: of the part of dp it is dp·p.

The forward pass where n is wanted in float8 and as rank products alone: n is not written then.

Implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, 16-bit activations (8.9 with float8);
- ``xla``: everything else.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pallas_kernels import low_rank
from pallas_kernels.dispatch import Implementation, Target, triton_or_xla
from pallas_kernels.float8.scaled import Rounded
from pallas_kernels.float8.triton import MOST_COLUMNS, too_wide
from pallas_kernels.rms_norm.lora import triton, xla
from pallas_kernels.rms_norm.xla import scale_of
from pallas_kernels.transformations import number, with_automatic_axes


class Normed(NamedTuple):
    """Residuals of the norm.

    Attributes:
        x: its input.
        weight: the scale of each feature, without the offset.
        rstd: reciprocal root mean square of each row, float32.
        products: n·Aᵀ.
    """

    x: Float[Array, "N E"]
    weight: Float[Array, " E"]
    rstd: Float[Array, " N"]
    products: Float[Array, "N R"]


class Gradients(NamedTuple):
    """Cotangents of the norm's results.

    Attributes:
        residual: the gradient of x beside the norm.
        normed: of n, through the large product alone.
        products: of n·Aᵀ.
    """

    residual: Float[Array, "N E"]
    normed: Float[Array, "N E"]
    products: Float[Array, "N R"]


def rms_norm_lora_round(
    x: Float[Array, "N E"],
    weight: Float[Array, " E"],
    lora_A: Float[Array, "R E"],
    *,
    eps: ArrayLike,
    offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Rounded, Float[Array, "N R"], Float[Array, " N"]]:
    """The normalised rows in float8 and multiplied with A, without an array of them in 16 bits.

    Args:
        x: input of the norm.
        weight: the scale of each feature, without the offset.
        lora_A: in the dtype of x.
        eps: as in `rms_norm`.
        offset: added to the weight; known while the function is traced.
        implementation: None, "triton" or "xla".

    Returns:
        n as `float8.quantize_rows` makes it; n·Aᵀ in the dtype of x; rstd, float32.

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    width = x.shape[-1:]
    if x.ndim != 2 or weight.shape != width or lora_A.shape[1:] != width or lora_A.dtype != x.dtype:
        raise ValueError(
            f"rms_norm_lora_round: for x {x.dtype}{list(x.shape)}, weight must be {list(width)} and lora_A {x.dtype} "
            f"[R, {width[0]}], got {list(weight.shape)} and {lora_A.dtype}{list(lora_A.shape)}"
        )
    offset = number("rms_norm_lora_round", "offset", offset)
    chosen = ROUND.chosen(implementation, **_facts(x, lora_A), float8=True)
    return chosen.forward(x, weight, lora_A, eps, offset)


def rms_norm_lora_backward(
    normed: Normed,
    lora_A: Float[Array, "R E"],
    gradients: Gradients,
    *,
    offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "N E"], Float[Array, " E"], Float[Array, "R E"]]:
    """The gradients of x in its dtype, of the weight and of A in float32.

    Args:
        normed: of the forward pass.
        lora_A: in the dtype of x.
        gradients: of its results.
        offset: added to the weight.
        implementation: None, "triton" or "xla".

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    x, rank = normed.x, lora_A.shape[0]
    wide = [array.shape for array in (gradients.residual, gradients.normed)]
    thin = [array.shape for array in (normed.products, gradients.products)]
    if wide != [x.shape] * 2 or thin != [(x.shape[0], rank)] * 2 or lora_A.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"rms_norm_lora_backward: for x {list(x.shape)} and lora_A {list(lora_A.shape)}, gradients must be of x's "
            f"shape and products of [{x.shape[0]}, {rank}], got {wide} and {thin}"
        )
    offset = number("rms_norm_lora_backward", "offset", offset)
    forward = REGISTRY.chosen(implementation, **_facts(x, lora_A)).forward
    return with_automatic_axes(
        functools.partial(_backward, forward, offset), normed, lora_A, gradients, rows_like=(x, None, None)
    )


def _backward(forward, offset: float, normed: Normed, lora_A: Array, gradients: Gradients):
    x, scale, rstd = normed.x, scale_of(normed.weight, offset, 1), normed.rstd
    dproducts = gradients.products.astype(jnp.float32)
    wide_normed, unit = gradients.normed.astype(jnp.float32), x.astype(jnp.float32) * rstd[:, None]
    # the row's factor outside of the sum, so that rstd's own sum may be made in the same pass over x
    mean = rstd * jnp.sum(wide_normed * scale[None] * x.astype(jnp.float32), axis=1)
    mean = (mean + jnp.sum(dproducts * normed.products.astype(jnp.float32), axis=1)) / x.shape[1]
    dx, dA = forward(x, scale, rstd, mean, lora_A, *gradients)
    through = jnp.dot(gradients.products, lora_A, precision="highest", preferred_element_type=jnp.float32)
    return dx, jnp.sum((wide_normed + through) * unit, axis=0), dA


def _facts(x: Array, lora_A: Array) -> dict[str, Any]:
    return {"rows": x.shape[0], "parts": x.shape[1:], "dtype": x.dtype, "rank": lora_A.shape[0]}


def _why_not_triton_round(device: Target, **facts) -> str | None:
    return low_rank.INPUT["triton"].reason(device, **facts) or too_wide(facts["parts"][0], MOST_COLUMNS)


def _round_by_triton(
    x: Array, weight: Array, lora_A: Array, eps: ArrayLike, offset: float
) -> tuple[Rounded, Array, Array]:
    rows, rstd = triton.round_rows(x, weight, eps, offset)
    scaled_A = (lora_A.astype(jnp.float32) * scale_of(weight, offset, 2)).astype(x.dtype)
    return rows, triton.products(x, rstd, scaled_A), rstd


#: forward(x, scale, rstd, mean, lora_A, dresidual, dnormed, dproducts) -> (gradient of x, of lora_A); `scale` is the
#: weight with its offset, `mean` that of g·x·rstd.
REGISTRY = triton_or_xla(
    "rms_norm.lora", low_rank.INPUT["triton"]._replace(forward=triton.backward), Implementation(xla.backward)
)
#: forward(x, weight, lora_A, eps, offset) -> (normalised rows in float8, rank products, rstd)
ROUND = triton_or_xla(
    "rms_norm.lora_round",
    Implementation(_round_by_triton, why_not=_why_not_triton_round),
    Implementation(xla.round_rows),
)
