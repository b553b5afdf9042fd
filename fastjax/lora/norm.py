"""A norm in the residual stream with the rank products of the projection that reads it, as one differentiable unit.

    n = norm(x)        p = n·Aᵀ        codes ⊗ scales ≈ n, in float8, where the projection reads that

The unit hands x through, so that its backward pass has the residual stream's gradient too: one pass makes the gradient
of x by all ways and that of A (`pallas_kernels.rms_norm.lora`). It keeps x, the rank products and a
number a row; under a policy that goes by name, that number is computed again in the pass that has to read x anyway,
or kept where n has been rounded: n itself is not made then.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fastjax.lora.rank_products import Matrices, Part, gradients_of_A, padded_A, rank_products, slot
from fastjax.parallel import ROWS, SHARES, local
from fastjax.residuals import name_residual
from pallas_kernels.float8 import Rounded
from pallas_kernels.rms_norm.lora import Gradients, Normed, rms_norm_lora_backward, rms_norm_lora_round
from pallas_kernels.rms_norm.xla import forward as rms_norm


class Scale(NamedTuple):
    """The static description of a norm.

    Attributes:
        eps: added to the mean square.
        offset: added to the weight.
    """

    eps: float
    offset: float


class Made(NamedTuple):
    """What a norm makes of its rows for the projection that reads them.

    Attributes:
        products: their rank products, as `rank_products` arranges them.
        rows: they themselves in float8; None: the projection reads them as they are.
    """

    products: Float[Array, "B S PR"]
    rows: Rounded | None


def normed_products(
    scale: Scale,
    parts: tuple[Part, ...],
    x: Float[Array, "B S E"],
    weight: Float[Array, " E"],
    matrices: Matrices,
    *,
    rounds: bool = False,
) -> tuple[Float[Array, "B S E"], Float[Array, "B S E"], Made]:
    """The input, to be read in its place; the normalised rows; what else they are read as.

    Args:
        scale: the norm's description.
        parts: of the projection; without dropout.
        x: the residual stream.
        weight: the norm's.
        matrices: A and B of the parts; B is not read.
        rounds: whether the projection reads them in float8; the normalised rows are computed where they are read.
    """
    found: Any = _unit(scale, parts, rounds, x, weight, matrices)
    x, normed, products, rows = found
    return x, normed, Made(products, jax.lax.stop_gradient(rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _unit(scale: Scale, parts: tuple[Part, ...], rounds: bool, x, weight, matrices: Matrices):
    return _forward(scale, parts, rounds, x, weight, matrices)[0]


def _forward(scale: Scale, parts: tuple[Part, ...], rounds: bool, x, weight, matrices: Matrices):
    normed, rstd = rms_norm(x, weight, scale.eps, scale.offset)
    if rounds:
        rows, products, rstd = _rounded(scale, parts, x, weight, matrices)
        rstd = name_residual(rstd, "lora")
    else:
        rows, products = None, rank_products(parts, matrices, normed, None, slot(parts))
    products = name_residual(products, "lora")
    return (x, normed, products, rows), (x, weight, rstd, products, matrices)


def _rounded(scale: Scale, parts: tuple[Part, ...], x, weight, matrices: Matrices) -> tuple[Rounded, Array, Array]:
    """The rows in float8, their rank products, and their reciprocal root mean squares [B, S, 1]."""

    def both(x, weight, lora_A):
        rows, products, rstd = rms_norm_lora_round(_rows(x), weight, lora_A, eps=scale.eps, offset=scale.offset)
        *lead, _ = x.shape
        return rows.over(*lead), products.reshape(*lead, -1), rstd.reshape(*lead, 1)

    island = local(both, in_specs=(ROWS, P(), P()), out_specs=(ROWS, ROWS, ROWS))
    rows, products, rstd = island(x, weight, padded_A(parts, matrices, x.dtype))
    return rows, products[..., : len(parts) * slot(parts)], rstd


def _backward(scale: Scale, parts: tuple[Part, ...], rounds: bool, residuals, gradients):
    x, weight, rstd, products, matrices = residuals
    gradients = gradients[:3]  # none comes through codes
    lora_A = padded_A(parts, matrices, x.dtype)
    spare = lora_A.shape[0] - products.shape[-1]

    def backward(x, weight, rstd, products, lora_A, gradients):
        def padded(thin):
            return jnp.pad(_rows(thin), ((0, 0), (0, spare)))

        dresidual, dnormed, dproducts = gradients
        normed = Normed(_rows(x), weight, rstd.reshape(-1), padded(products))
        found = Gradients(_rows(dresidual), _rows(dnormed), padded(dproducts))
        dx, dweight, dA = rms_norm_lora_backward(normed, lora_A, found, offset=scale.offset)
        return dx.reshape(x.shape), dweight[None], dA[None]

    island = local(backward, in_specs=(ROWS, P(), ROWS, ROWS, P(), ROWS), out_specs=(ROWS, SHARES, SHARES))
    dx, dweight, dA = island(x, weight, rstd, products, lora_A, gradients)
    own = gradients_of_A(parts, jnp.sum(dA, axis=0), slot(parts))
    trained = {name: (own[name].astype(a.dtype), jnp.zeros_like(b)) for name, (a, b) in matrices.items()}
    return dx, jnp.sum(dweight, axis=0).astype(weight.dtype), trained


_unit.defvjp(_forward, _backward)


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])
