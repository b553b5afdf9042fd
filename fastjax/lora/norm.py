"""A norm in the residual stream with the rank products of the projection that reads it, as one differentiable unit.

    n = norm(x)        p = n·Aᵀ        codes ⊗ scales ≈ n, in float8, where the projection reads that

The unit hands x through, so that its backward pass has the residual stream's gradient too: one pass makes the gradient
of x by all ways and that of A (`pallas_kernels.rms_norm.lora`). It keeps x, the rank products and a
number a row; under a policy that goes by name, that number is computed again in the pass that has to read x anyway,
or kept where n has been rounded: n itself is not prepared then.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fastjax.lora.few_rows import Addends, adapters_of, flat, served
from fastjax.lora.rank_products import Matrices, PartSpec, gradients_of_A, padded_A, rank_products, slot
from fastjax.lora.units import on_rows, unit
from fastjax.residuals import name_residual
from pallas_kernels import few_rows
from pallas_kernels.float8 import Rounded
from pallas_kernels.rms_norm.lora import Gradients, Normed, rms_norm_lora_backward, rms_norm_lora_round
from pallas_kernels.rms_norm.xla import forward as rms_norm


class NormConstants(NamedTuple):
    """The static description of a norm.

    Attributes:
        eps: added to the mean square.
        offset: added to the weight.
    """

    eps: float
    offset: float


class PreparedRows(NamedTuple):
    """Normalised rows as the projection that reads them takes them.

    Attributes:
        products: their rank products, as `rank_products` arranges them.
        rows: they themselves in float8; None: the projection reads them as they are.
    """

    products: Float[Array, "B S PR"] | Addends
    rows: Rounded | None

    def added(self, dtype: jnp.dtype) -> Float[Array, "B S PR"]:
        """The rank products, where they are addends in this dtype."""
        return self.products.added(dtype) if isinstance(self.products, Addends) else self.products


def normed_products(
    scale: NormConstants,
    parts: tuple[PartSpec, ...],
    x: Float[Array, "B S E"],
    weight: Float[Array, " E"],
    matrices: Matrices,
    *,
    rounds: bool = False,
) -> tuple[Float[Array, "B S E"], Float[Array, "B S E"], PreparedRows]:
    """The input, to be read in its place; the normalised rows; what else they are read as.

    Args:
        scale: the norm's description.
        parts: of the projection; without dropout.
        x: the residual stream.
        weight: the norm's.
        matrices: A and B of the parts; B is not read.
        rounds: whether the projection reads them in float8; the normalised rows are computed where they are read.
    """
    x, normed, products, rows = _unit(scale, parts, rounds, x, weight, matrices)
    return x, normed, PreparedRows(products, jax.lax.stop_gradient(rows))


def _forward(scale: NormConstants, parts: tuple[PartSpec, ...], rounds: bool, x, weight, matrices: Matrices):
    normed, rstd = rms_norm(x, weight, scale.eps, scale.offset)
    if rounds:
        rows, products, rstd = _rounded(scale, parts, x, weight, matrices)
        rstd = name_residual(rstd, "lora")
    else:
        rows, products = None, rank_products(parts, matrices, normed, None)
    products = name_residual(products, "lora")
    return (x, normed, products, rows), (x, weight, rstd, products, matrices)


def _few(scale: NormConstants, parts: tuple[PartSpec, ...], rounds: bool, x, weight, matrices: Matrices):
    adapters = adapters_of(parts, matrices)
    if rounds or not served(x, adapters):
        return None
    normed, shares = few_rows.normed_products(flat(x), weight, adapters, eps=scale.eps, offset=scale.offset)
    return x, normed.reshape(x.shape), Addends(shares, x.shape[0], adapters), None


def _rounded(
    scale: NormConstants, parts: tuple[PartSpec, ...], x, weight, matrices: Matrices
) -> tuple[Rounded, Array, Array]:
    """The rows in float8, their rank products, and their reciprocal root mean squares [B, S, 1]."""

    def both(x, weight, lora_A):
        rows, products, rstd = rms_norm_lora_round(x, weight, lora_A, eps=scale.eps, offset=scale.offset)
        return rows, products, rstd[:, None]

    rows, products, rstd = on_rows(both, (x,), (weight, padded_A(parts, matrices, x.dtype)))
    return rows, products[..., : len(parts) * slot(parts)], rstd


def _backward(scale: NormConstants, parts: tuple[PartSpec, ...], rounds: bool, residuals, gradients):
    x, weight, rstd, products, matrices = residuals
    lora_A = padded_A(parts, matrices, x.dtype)
    spare = lora_A.shape[0] - products.shape[-1]

    def backward(x, rstd, products, dresidual, dnormed, dproducts, weight, lora_A):
        products, dproducts = (jnp.pad(thin, ((0, 0), (0, spare))) for thin in (products, dproducts))
        normed = Normed(x, weight, rstd.reshape(-1), products)
        return rms_norm_lora_backward(normed, lora_A, Gradients(dresidual, dnormed, dproducts), offset=scale.offset)

    rows = (x, rstd, products, *gradients[:3])  # no gradient comes through codes
    dx, dweight, dA = on_rows(backward, rows, (weight, lora_A), sums=2)
    gradients_A = gradients_of_A(parts, dA, slot(parts))
    trained = {name: (gradients_A[name].astype(a.dtype), jnp.zeros_like(b)) for name, (a, b) in matrices.items()}
    return dx, dweight.astype(weight.dtype), trained


_unit = unit(_forward, _backward, statics=3, few=_few)
