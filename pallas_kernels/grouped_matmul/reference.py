"""The products over groups in plain jax.numpy, one group after the other: slow, obviously right."""

import jax.numpy as jnp
from jax import Array


def _group_of_rows(rows: int, group_sizes: Array) -> Array:
    """The group of each row; past the last group: their number."""
    return jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows), side="right")


LowRank = tuple[Array, Array] | None


def matmul(x: Array, w: Array, group_sizes: Array, rows: Array | None = None, low_rank: LowRank = None) -> Array:
    """y_i = w[g(i)] x_i + b[g(i)] z_i in float32, with low_rank = (z, b)."""
    x = x if rows is None else x[rows]
    groups = _group_of_rows(x.shape[0], group_sizes)
    result = jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
    for group in range(w.shape[0]):
        product = x.astype(jnp.float32) @ w[group].astype(jnp.float32).T
        result = jnp.where((groups == group)[:, None], product, result)
    return result if low_rank is None else result + matmul(*low_rank, group_sizes)


def dx(dy: Array, w: Array, group_sizes: Array, rows: Array | None = None, low_rank: LowRank = None) -> Array:
    """dx_i = dy_i w[g(i)] + z_i a[g(i)] in float32, with low_rank = (z, a)."""
    return matmul(dy, w.swapaxes(1, 2), group_sizes, rows, low_rank and (low_rank[0], low_rank[1].swapaxes(1, 2)))


def dw(dy: Array, x: Array, group_sizes: Array, rows: Array | None = None) -> Array:
    """dw[g] = Σ dy_i x_iᵀ over the rows of the group, in float32."""
    x = x if rows is None else x[rows]
    groups = _group_of_rows(x.shape[0], group_sizes)
    own = [jnp.where((groups == group)[:, None], dy, 0).astype(jnp.float32) for group in range(len(group_sizes))]
    return jnp.stack([part.T @ x.astype(jnp.float32) for part in own])
