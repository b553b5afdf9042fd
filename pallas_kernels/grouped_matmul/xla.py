"""The products over groups by `jax.lax.ragged_dot`.

On a GPU XLA expands it to one product of all rows with every group's matrix: right, and slower by their number.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

_OUTER = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


def matmul(x: Array, w: Array, group_sizes: Array, rows: Array | None, low_rank: tuple[Array, Array] | None) -> Array:
    """y_i = w[g(i)] x_i + b[g(i)] z_i."""
    turned = None if low_rank is None else (low_rank[0], low_rank[1].swapaxes(1, 2))
    return dx(x, w.swapaxes(1, 2), group_sizes, rows, turned)


def dx(dy: Array, w: Array, group_sizes: Array, rows: Array | None, low_rank: tuple[Array, Array] | None) -> Array:
    """dx_i = dy_i w[g(i)] + z_i a[g(i)]."""
    pairs = [(dy if rows is None else dy[rows], w), *([] if low_rank is None else [low_rank])]
    options = {"precision": _precision(dy), "preferred_element_type": jnp.float32}
    products = [lax.ragged_dot(*pair, group_sizes, **options) for pair in pairs]
    return sum(products[1:], products[0]).astype(dy.dtype)


def dw(dy: Array, x: Array, group_sizes: Array, rows: Array | None, dtype: DTypeLike) -> Array:
    """dw[g] = Σ dy_i x_iᵀ over the rows of the group."""
    x = x if rows is None else x[rows]
    options = {"precision": _precision(dy), "preferred_element_type": jnp.float32}
    return lax.ragged_dot_general(dy, x, group_sizes, _OUTER, **options).astype(dtype)


def _precision(x: Array) -> lax.Precision | None:
    """True float32 for float32, not TF32."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
