"""A product of float8 codes that does not have its scales yet, for readers that apply them as they read.

The scales are powers of two, so that nothing is rounded whether they are applied before or after the product goes
through memory in bfloat16; applied by the reader, they cost no pass over it.

A kernel that has much to do in registers takes rows ⊗ columns from the tensor cores (`thin`, `pallas_kernels.thin`);
others read the vectors of scales (`values_at`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.thin import PARTS, parts, side_by_side


class Rounded(NamedTuple):
    """Rows in float8_e4m3fn, codes ⊗ scales; as `api.quantize_rows` makes them.

    Attributes:
        codes: float8_e4m3fn.
        scales: float32, powers of two.
    """

    codes: Float[Array, "*rows in"]
    scales: Float[Array, "*rows"]

    def over(self, *axes: int) -> "Rounded":
        """These rows over other axes.

        Args:
            axes: their sizes; as many rows as there are.
        """
        return Rounded(self.codes.reshape(*axes, self.codes.shape[-1]), self.scales.reshape(axes))


class Scaled(NamedTuple):
    """The matrix product · (rows ⊗ columns).

    Attributes:
        product: of the codes.
        rows: float32, the left operand's scales, powers of two.
        columns: float32, the right operand's; of a folder in FP8 they may be any numbers.
    """

    product: Float[Array, "*rows out"]
    rows: Float[Array, "*rows"]
    columns: Float[Array, " out"]


class Thin(NamedTuple):
    """A `Scaled` for a kernel, which is given its rows' scales by `thin`.

    Attributes:
        product: of the codes.
        columns: bfloat16, the right operand's scales in parts.
    """

    product: Float[Array, "N out"]
    columns: Float[Array, "out 16"]


def product_of(x: Float[Array, "*rows out"] | Scaled | Thin) -> Float[Array, "*rows out"]:
    """The array that has the matrix's shape and the dtype in which it is read.

    Args:
        x: an array is its own.
    """
    return x.product if isinstance(x, (Scaled, Thin)) else x


def scaled_values(x: Float[Array, "*rows out"] | Scaled) -> Float[Array, "*rows out"]:
    """The matrix in float32.

    Args:
        x: an array has no scales.
    """
    if not isinstance(x, Scaled):
        return x.astype(jnp.float32)
    columns = x.columns.reshape((1,) * x.rows.ndim + x.columns.shape)
    return x.product.astype(jnp.float32) * (x.rows[..., None] * columns)


def thin(operands: Sequence[Any]) -> tuple[Float[Array, "N 16"] | None, list[Any]]:
    """Operands for a kernel that multiplies by rows ⊗ columns of each: exactly where these are powers of two.

    Args:
        operands: of two axes, with the same rows; at most five of them `Scaled`, others stay as they are.

    Returns:
        The scales of all operands' rows, bfloat16, each beside 0 in the columns of the others; None: none has any.
        The operands, with `Thin` in place of `Scaled`.
    """
    rows, thinned = [], []
    for operand in operands:
        if isinstance(operand, Scaled):
            before = len(rows)
            rows += [operand.rows.astype(jnp.bfloat16)] * PARTS
            thinned.append(Thin(operand.product, side_by_side(parts(operand.columns), before)))
        else:
            thinned.append(operand)
    return (side_by_side(rows) if rows else None), thinned


def values_at(ref, rows, cols) -> Float[Array, "rows cols"]:
    """A part of the matrix in float32, in a kernel.

    Args:
        ref: reference to an array [N, out] or to a `Scaled` of two axes.
        rows: index into the first axis.
        cols: index into the second.
    """
    values = product_of(ref)[rows, cols].astype(jnp.float32)
    return values * (ref.rows[rows][:, None] * ref.columns[cols][None, :]) if isinstance(ref, Scaled) else values


def thin_values_at(ref, rows, cols, of_rows, of_columns=None) -> Float[Array, "rows cols"]:
    """A part of a matrix in float32, in a Triton kernel.

    Args:
        ref: reference to an array [N, out] or to a `Thin`.
        rows: index into the first axis.
        cols: index into the second.
        of_rows: these rows of what `thin` has returned first.
        of_columns: these rows of the `columns` of `ref`, where they have been read before.
    """
    values = product_of(ref)[rows, cols].astype(jnp.float32)
    if not isinstance(ref, Thin):
        return values
    return values * pltriton.dot(of_rows, ref.columns[cols, :] if of_columns is None else of_columns, trans_b=True)


def flat_rows(x: Float[Array, "*rows out"] | Scaled) -> Float[Array, "N out"] | Scaled:
    """The matrix with one axis of rows.

    Args:
        x: an array, or a product with its scales.
    """
    if isinstance(x, Scaled):
        return Scaled(flat_rows(x.product), x.rows.reshape(-1), x.columns)  # pyright: ignore[reportArgumentType]
    return x.reshape(-1, x.shape[-1])
