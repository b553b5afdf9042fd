"""A product of float8 codes that does not have its scales yet, for readers that apply them as they read.

The scales are powers of two, so that nothing is rounded whether they are applied before or after the product goes
through memory in bfloat16; applied by the reader, they cost no pass over it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Scaled(NamedTuple):
    """The matrix product · (rows ⊗ columns).

    Attributes:
        product: of the codes.
        rows: float32, the left operand's scales.
        columns: float32, the right operand's.
    """

    product: Float[Array, "*rows out"]
    rows: Float[Array, "*rows"]
    columns: Float[Array, " out"]


def product_of(x: Float[Array, "*rows out"] | Scaled) -> Float[Array, "*rows out"]:
    """The array that has the matrix's shape and the dtype in which it is read.

    Args:
        x: an array is its own.
    """
    return x.product if isinstance(x, Scaled) else x


def scaled_values(x: Float[Array, "*rows out"] | Scaled) -> Float[Array, "*rows out"]:
    """The matrix in float32.

    Args:
        x: an array has no scales.
    """
    if not isinstance(x, Scaled):
        return x.astype(jnp.float32)
    columns = x.columns.reshape((1,) * x.rows.ndim + x.columns.shape)
    return x.product.astype(jnp.float32) * (x.rows[..., None] * columns)


def values_at(ref, rows, cols) -> Float[Array, "rows cols"]:
    """A part of the matrix in float32.

    Args:
        ref: in a kernel, the reference to an array [N, out] or to a `Scaled` of two axes.
        rows: index into the first axis.
        cols: index into the second.
    """
    values = product_of(ref)[rows, cols].astype(jnp.float32)
    return values * (ref.rows[rows][:, None] * ref.columns[cols][None, :]) if isinstance(ref, Scaled) else values


def flat_rows(x: Float[Array, "*rows out"] | Scaled) -> Float[Array, "N out"] | Scaled:
    """The matrix with one axis of rows.

    Args:
        x: an array, or a product with its scales.
    """
    if isinstance(x, Scaled):
        return Scaled(flat_rows(x.product), x.rows.reshape(-1), x.columns)  # pyright: ignore[reportArgumentType]
    return x.reshape(-1, x.shape[-1])
