"""The three products in NumPy and float64."""

import numpy as np


def _slices(group_sizes):
    bounds = np.cumsum([0, *np.asarray(group_sizes)])
    return [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _wide(array, rows=None):
    array = np.asarray(array, np.float64)
    return array if rows is None else array[np.asarray(rows)]


def matmul(x, w, group_sizes, rows=None, low_rank=None):
    """y_i = w[g(i)] x_i + b[g(i)] z_i."""
    x, w = _wide(x, rows), _wide(w)
    result = np.zeros((x.shape[0], w.shape[1]))
    for group, own in enumerate(_slices(group_sizes)):
        result[own] = x[own] @ w[group].T
    return result if low_rank is None else result + matmul(*low_rank, group_sizes)


def dx(dy, w, group_sizes, rows=None, low_rank=None):
    """dx_i = dy_i w[g(i)] + z_i a[g(i)]."""
    turned = None if low_rank is None else (low_rank[0], _wide(low_rank[1]).swapaxes(1, 2))
    return matmul(dy, _wide(w).swapaxes(1, 2), group_sizes, rows, turned)


def dw(dy, x, group_sizes, rows=None):
    """dw[g] = Σ dy_i x_iᵀ."""
    dy, x = _wide(dy), _wide(x, rows)
    return np.stack([dy[own].T @ x[own] for own in _slices(group_sizes)])
