"""The product of a tile of rows in Pallas-Triton, by matrix instructions where these are as many as they take."""

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as pltriton

ROWS = 16
"""Rows of a tile that matrix instructions multiply; fewer are multiplied element by element, exact in float32."""


def product(x: Array, matrix: Array) -> Array:
    """The product x·Mᵀ, float32 [rows, M's rows].

    Args:
        x: [rows, K], up to `ROWS` of them, in 16 bits.
        matrix: [M's rows, K], in the dtype of x.
    """
    if x.shape[0] == ROWS:
        if matrix.shape[0] > ROWS:  # the warps lie along the first axis
            return pltriton.dot(matrix, x, trans_b=True).T
        return pltriton.dot(x, matrix, trans_b=True)
    x, matrix = x.astype(jnp.float32), matrix.astype(jnp.float32)
    return jnp.sum(x[:, None, :] * matrix[None, :, :], axis=2)
