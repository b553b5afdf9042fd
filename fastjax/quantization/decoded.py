"""Packed weights that are decoded for each product: when the other operand is there, and kept by nobody.

The backward pass decodes again; no dequantised matrix is a residual.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fastjax.quantization.weight import Weight, decode_when_needed, plain_product
from pallas_kernels.rounding import round_through


class DecodedWeight(Weight):
    """A frozen matrix whose products decode it, a dataclass whose arrays have its rows on their last axis but one.

    Attributes:
        shape: (out, in).
        dtype: of the decoded weight, "bfloat16", "float16" or "float32".
    """

    shape: tuple[int, int]
    dtype: str

    def cast(self, values: Float[Array, "out ..."], dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """Decoded values in `dtype`, by way of the weight's own.

        Args:
            values: float32.
            dtype: of the product.
        """
        through = None if self.dtype == jnp.dtype(dtype).name else self.dtype
        return round_through(values.reshape(self.shape), through).astype(dtype)

    def matmul(self, x: Float[Array, "B S in"]) -> Float[Array, "B S out"]:
        """x·Wᵀ in the dtype of x; a gradient flows to x alone."""
        return _product(x, self)  # pyright: ignore[reportReturnType]

    def rows(self, rows: slice) -> Self:
        """Some of the output rows."""
        return jax.tree.map(lambda array: array[..., rows, :], self)._of_rows(rows.stop - rows.start)

    def concatenate(self, others: Sequence[Any]) -> Self | None:
        """One weight below the other, or None where arrays or settings differ in more than the number of rows."""
        alike = [weight._of_rows(0) for weight in (self, *others)]
        kinds = {(jax.tree.structure(w), *((a.shape[-1], a.dtype) for a in jax.tree.leaves(w))) for w in alike}
        if len(kinds) > 1:
            return None
        whole = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=-2), *alike)
        return whole._of_rows(sum(weight.shape[0] for weight in (self, *others)))

    def axes(self, out: str | None, into: str | None) -> Self:
        """All arrays have the matrix's axes."""
        return jax.tree.map(lambda _: P(out, into), self)

    def _of_rows(self, count: int) -> Self:
        return dataclasses.replace(self, shape=(count, self.shape[1]))  # pyright: ignore[reportArgumentType]


@jax.custom_vjp
def _product(x, weight):
    return weight.matmul_into(x, x.dtype)


def _forward(x, weight):
    return _product(x, weight), weight


def _backward(weight, dy):
    dy, matrix = decode_when_needed(dy, weight)
    return plain_product(dy, matrix, 0), None


_product.defvjp(_forward, _backward)
