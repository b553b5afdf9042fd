"""Products of sorted rows with one matrix a group, for experts of a mixture; groups may have any size, also none.

Rows [0, group_sizes[0]) belong to group 0, the next group_sizes[1] to group 1, and so on. Sums are taken in float32.

The backward pass has two products, which choose their own implementations: in x (`grouped_matmul_dx`) and in w
(`grouped_matmul_dw`). Rows may be gathered in the load of x (`rows`), so that a token's copies for several experts
never exist; their gradient is summed over the copies. A low-rank product may be added inside the same sum.

Implementations, in order of preference:

- ``mosaic``: Hopper, 16 bits;
- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, 16 bits;
- ``xla``: everything else, by `jax.lax.ragged_dot`.
"""

import functools

import jax.custom_batching
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels.dispatch import HALF, Implementation, Registry, Target
from pallas_kernels.grouped_matmul import mosaic_sm90, triton, xla
from pallas_kernels.transformations import custom_vjp, with_automatic_axes


def grouped_matmul(
    x: Float[Array, "T K"],
    w: Float[Array, "X N K"],
    group_sizes: Int[Array, " X"],
    *,
    rows: Int[Array, " M"] | None = None,
    low_rank: tuple[Float[Array, "M R"], Float[Array, "X N R"]] | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """y_i = w[g(i)] x_i + b[g(i)] z_i, with x_i = x[rows[i]]; differentiable in x, w, z and b.

    Args:
        x: float32, bfloat16 or float16.
        w: one matrix a group, of x's dtype.
        group_sizes: int32, rows of each group, in all at most M. Past the last group the first `ZEROS_BEHIND` rows of
            the result are zeros, and what the others hold has no meaning; gradients are zeros there.
        rows: int32, row of x for each row of the result, in [0, T); None: x's own rows, M = T.
        low_rank: z and b, of x's dtype; None: no second product.
        implementation: None, "mosaic", "triton" or "xla", for all three products.

    Returns:
        The products, in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    _check("grouped_matmul", x, w, group_sizes, rows, low_rank, summed=2)
    return _matmul(x, w, group_sizes, rows, low_rank, implementation)


def grouped_matmul_dx(
    dy: Float[Array, "T N"],
    w: Float[Array, "X N K"],
    group_sizes: Int[Array, " X"],
    *,
    rows: Int[Array, " M"] | None = None,
    low_rank: tuple[Float[Array, "M R"], Float[Array, "X R K"]] | None = None,
    implementation: str | None = None,
) -> Float[Array, "M K"]:
    """dx_i = dy_i w[g(i)] + z_i a[g(i)], with dy_i = dy[rows[i]]; not differentiable.

    Arguments and errors as of `grouped_matmul`.
    """
    _check("grouped_matmul_dx", dy, w, group_sizes, rows, low_rank, summed=1)
    like = dy if rows is None else rows
    forward = DX.chosen(implementation, rows=like.shape[0], shape=w.shape, dtype=dy.dtype).forward
    return with_automatic_axes(forward, dy, w, group_sizes, rows, low_rank, rows_like=like)


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
        dy: gradient of the products. Of its rows past the last group the first `ZEROS_BEHIND` are finite, and so are
            x's, if those are not gathered; the others are not read.
        x: of dy's dtype.
        group_sizes: as in `grouped_matmul`.
        rows: as in `grouped_matmul`, for x.
        dtype: of the result; None: dy's.
        implementation: None, "mosaic", "triton" or "xla".

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    op = "grouped_matmul_dw"
    count = (x if rows is None else rows).shape[0]
    if dy.ndim != 2 or x.ndim != 2 or dy.shape[0] != count or dy.dtype != x.dtype:
        raise ValueError(f"{op}: expected dy of {count} rows in {x.dtype}, given {dy.shape} in {dy.dtype}")
    _check_groups(op, group_sizes, rows)
    dtype = jnp.dtype(dy.dtype if dtype is None else dtype)
    shape = (group_sizes.shape[0], dy.shape[1], x.shape[1])
    chosen = DW.chosen(implementation, rows=count, shape=shape, dtype=dy.dtype, result=dtype)
    forward = functools.partial(chosen.forward, dtype=dtype)
    return with_automatic_axes(forward, dy, x, group_sizes, rows, rows_like=None)


@custom_vjp(nondiff_argnums=(5,))
def _matmul(x, w, group_sizes, rows, low_rank, implementation: str | None) -> Array:
    like = x if rows is None else rows
    forward = MATMUL.chosen(implementation, rows=like.shape[0], shape=w.shape, dtype=x.dtype).forward
    return with_automatic_axes(forward, x, w, group_sizes, rows, low_rank, rows_like=like)


def _matmul_forward(x, w, group_sizes, rows, low_rank, implementation):
    return _matmul(x, w, group_sizes, rows, low_rank, implementation), (x, w, group_sizes, rows, low_rank)


def _matmul_backward(implementation, kept, dy):
    x, w, group_sizes, rows, low_rank = kept
    own = jnp.arange(dy.shape[0])[:, None] < jnp.sum(group_sizes)
    dy = jnp.where(own, dy, 0)
    transposed = functools.partial(grouped_matmul_dx, dy, group_sizes=group_sizes, implementation=implementation)
    outer = functools.partial(grouped_matmul_dw, dy, group_sizes=group_sizes, implementation=implementation)
    dx = jnp.where(own, transposed(w), 0)
    if rows is not None:
        dx = with_automatic_axes(functools.partial(_summed, x), dx, rows, rows_like=x)
    more = None if low_rank is None else (jnp.where(own, transposed(low_rank[1]), 0), outer(low_rank[0]))
    return dx, outer(x, rows=rows), None, None, more


def _summed(x: Array, copies: Array, rows: Array) -> Array:
    """The gradient of x from that of its rows' copies."""
    return jnp.zeros(x.shape, jnp.float32).at[rows].add(copies.astype(jnp.float32)).astype(x.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _check(op: str, x: Array, w: Array, group_sizes: Array, rows, low_rank, *, summed: int) -> None:
    count = (x if rows is None else rows).shape[0]
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[summed]:
        wanted = "[X, N, K] beside x [T, K]" if summed == 2 else "[X, N, K] beside dy [T, N]"
        raise ValueError(f"{op}: expected w {wanted}, given w {w.shape} and {x.shape}")
    if low_rank is not None:
        z, b = low_rank
        written = w.shape[3 - summed]
        wanted = (w.shape[0], written, z.shape[-1]) if summed == 2 else (w.shape[0], z.shape[-1], written)
        if z.ndim != 2 or z.shape[0] != count or b.shape != wanted:
            raise ValueError(
                f"{op}: expected low_rank of [{count}, R] and, with R = {z.shape[-1]}, {wanted}, given {z.shape} and "
                f"{b.shape}"
            )
    dtypes = [array.dtype for array in (x, w, *(low_rank or ()))]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: expected operands of one floating dtype, given {', '.join(map(str, dtypes))}")
    if group_sizes.shape != w.shape[:1]:
        raise ValueError(f"{op}: expected {w.shape[0]} group_sizes, one a matrix, given shape {group_sizes.shape}")
    _check_groups(op, group_sizes, rows)


def _check_groups(op: str, group_sizes: Array, rows: Array | None) -> None:
    for name, array in (("group_sizes", group_sizes), ("rows", rows)):
        if array is not None and (array.ndim != 1 or array.dtype != jnp.int32):
            raise ValueError(f"{op}: expected {name} of one axis in int32, given {array.shape} in {array.dtype}")


def why_not_any_kernel(
    _: Target, rows: int, shape: tuple[int, ...], dtype: DTypeLike, result: DTypeLike | None = None
) -> str | None:
    """Why no kernel serves a product over groups, as a clause; None: one may."""
    if result is not None and jnp.dtype(result) not in (jnp.dtype(dtype), jnp.float32):
        return f"it writes {jnp.dtype(dtype)} or float32, not {jnp.dtype(result)}"
    if not rows or 0 in shape:
        return f"it takes no empty arrays, these are {rows} rows and matrices {shape}"
    return None


def _one_by_one(product):
    """Mapped by `jax.vmap`, products over groups are made one after the other: none of them has a batch of its own."""

    def call(*operands, **options):
        return jax.custom_batching.sequential_vmap(functools.partial(product, **options))(*operands)

    return call


def _registry(op: str, of_mosaic, of_triton, of_xla) -> Registry:
    kernel = Implementation(_one_by_one(of_triton), capability=(8, 0), dtypes=HALF, why_not=why_not_any_kernel)
    hopper = kernel._replace(forward=_one_by_one(of_mosaic), capability=(9, 0), exactly=True)
    return Registry(op, {"mosaic": hopper, "triton": kernel, "xla": Implementation(_one_by_one(of_xla))})


#: forward(x, w, group_sizes, rows, low_rank) -> y
MATMUL = _registry("grouped_matmul", mosaic_sm90.matmul, triton.matmul, xla.matmul)
#: forward(dy, w, group_sizes, rows, low_rank) -> dx
DX = _registry("grouped_matmul_dx", mosaic_sm90.dx, triton.dx, xla.dx)
#: forward(dy, x, group_sizes, rows, dtype) -> dw
DW = _registry("grouped_matmul_dw", mosaic_sm90.dw, triton.dw, xla.dw)
