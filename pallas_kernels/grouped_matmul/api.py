"""Products of sorted rows with one matrix a group, for experts of a mixture; groups may have any size, also none.

Rows [0, group_sizes[0]) belong to group 0, the next group_sizes[1] to group 1, and so on. Sums are taken in float32.

The backward pass has two products, which choose their own implementations: in x (`grouped_matmul_dx`) and in w
(`grouped_matmul_dw`). Rows may be gathered in the load of x (`rows`), so that a token's copies for several experts
never exist; their gradient is summed over the copies.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul.implementations import DW, DX, MATMUL, Case


def grouped_matmul(
    x: Float[Array, "T K"],
    w: Float[Array, "X N K"],
    group_sizes: Int[Array, " X"],
    *,
    rows: Int[Array, " M"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """y_i = w[g(i)] x_i, with x_i = x[rows[i]]; differentiable in x and w.

    Args:
        x: float32, bfloat16 or float16.
        w: one matrix a group, of x's dtype.
        group_sizes: int32, rows of each group, in all at most M; rows past the last group give zeros.
        rows: int32, row of x for each row of the result, in [0, T); None: x's own rows, M = T.
        implementation: None, or the name of one for all three products.

    Returns:
        The products, in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    _check("grouped_matmul", x, w, group_sizes, rows, contracted=2)
    return _matmul(x, w, group_sizes, rows, implementation)


def grouped_matmul_dx(
    dy: Float[Array, "M N"],
    w: Float[Array, "X N K"],
    group_sizes: Int[Array, " X"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M K"]:
    """dx_i = dy_i w[g(i)], in dy's dtype. Arguments and errors as of `grouped_matmul`; not differentiable."""
    _check("grouped_matmul_dx", dy, w, group_sizes, None, contracted=1)
    case = Case(dispatch.target(), dy.shape[0], w.shape, (dy.dtype, w.dtype, dy.dtype), False)
    return DX[DX.choose(case, implementation)].forward(dy, w, group_sizes)


def grouped_matmul_dw(
    dy: Float[Array, "M N"],
    x: Float[Array, "T K"],
    group_sizes: Int[Array, " X"],
    *,
    rows: Int[Array, " M"] | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "X N K"]:
    """dw[g] = Σ dy_i x_iᵀ over the rows of group g; zeros for an empty one. Not differentiable.

    Args:
        dy: gradient of the products.
        x: of dy's dtype.
        group_sizes: as in `grouped_matmul`.
        rows: likewise.
        dtype: of the result; None: dy's.
        implementation: None, or its name.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    count = x.shape[0] if rows is None else rows.shape[0]
    if dy.shape[0] != count or dy.dtype != x.dtype:
        raise ValueError(f"grouped_matmul_dw: expected dy of {count} rows in {x.dtype}, given {dy.shape} in {dy.dtype}")
    _check_groups("grouped_matmul_dw", group_sizes, rows)
    dtype = jnp.dtype(dy.dtype if dtype is None else dtype)
    shape = (group_sizes.shape[0], dy.shape[1], x.shape[1])
    case = Case(dispatch.target(), count, shape, (dy.dtype, x.dtype, dtype), rows is not None)
    return DW[DW.choose(case, implementation)].forward(dy, x, group_sizes, rows, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _matmul(x: Array, w: Array, group_sizes: Array, rows: Array | None, implementation: str | None) -> Array:
    count = x.shape[0] if rows is None else rows.shape[0]
    case = Case(dispatch.target(), count, w.shape, (x.dtype, w.dtype, x.dtype), rows is not None)
    return MATMUL[MATMUL.choose(case, implementation)].forward(x, w, group_sizes, rows)


def _matmul_forward(x, w, group_sizes, rows, implementation):
    return _matmul(x, w, group_sizes, rows, implementation), (x, w, group_sizes, rows)


def _matmul_backward(implementation, kept, dy):
    x, w, group_sizes, rows = kept
    dx = grouped_matmul_dx(dy, w, group_sizes, implementation=implementation)
    if rows is not None:
        dx = jnp.zeros(x.shape, jnp.float32).at[rows].add(dx.astype(jnp.float32)).astype(x.dtype)
    dw = grouped_matmul_dw(dy, x, group_sizes, rows=rows, dtype=w.dtype, implementation=implementation)
    nothing = np.zeros(group_sizes.shape, jax.dtypes.float0)
    return dx, dw, nothing, None if rows is None else np.zeros(rows.shape, jax.dtypes.float0)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _check(op: str, x: Array, w: Array, group_sizes: Array, rows: Array | None, contracted: int) -> None:
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[contracted]:
        wanted = "[X, N, K] beside x [T, K]" if contracted == 2 else "[X, N, K] beside dy [M, N]"
        raise ValueError(f"{op}: expected w {wanted}, given w {w.shape} and {x.shape}")
    if w.dtype != x.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: expected operands of one floating dtype, given {x.dtype} and {w.dtype}")
    if group_sizes.shape != w.shape[:1]:
        raise ValueError(f"{op}: expected {w.shape[0]} group_sizes, one a matrix, given shape {group_sizes.shape}")
    _check_groups(op, group_sizes, rows)


def _check_groups(op: str, group_sizes: Array, rows: Array | None) -> None:
    for name, array in (("group_sizes", group_sizes), ("rows", rows)):
        if array is not None and (array.ndim != 1 or array.dtype != jnp.int32):
            raise ValueError(f"{op}: expected {name} of one axis in int32, given {array.shape} in {array.dtype}")
