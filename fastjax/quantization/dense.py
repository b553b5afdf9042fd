"""A plain array as a weight. The model's tree holds the array alone, so checkpoints and optimizers see arrays."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fastjax.quantization.weight import Weight, plain_product
from pallas_kernels.grouped_matmul import grouped_matmul_dw


@dataclasses.dataclass(frozen=True)
class DenseWeight(Weight):
    """A matrix in 16 or 32 bits.

    Attributes:
        array: [out, in], or [X, out, in] of experts.
    """

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(out, in)."""
        return self.array.shape[-2:]

    @property
    def formats(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Its dtype."""
        return (str(self.array.dtype),)

    def matmul_into(self, x: Float[Array, "B S in"], dtype: jax.typing.DTypeLike) -> Float[Array, "B S out"]:
        """x·Wᵀ in a dtype."""
        return plain_product(x, self.array.astype(x.dtype), 1, dtype)

    def transposed(self, dy: Float[Array, "B S out"]) -> Float[Array, "B S in"]:
        """dy·W in the dtype of dy."""
        return linear(dy, self.array.T)

    def gradient(self, dy: Float[Array, "B S out"], x: Float[Array, "B S in"]) -> Float[Array, "out in"]:
        """dyᵀ·x in the array's dtype."""
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        dims = (((0, 1), (0, 1)), ((), ()))
        return jax.lax.dot_general(dy, x, dims, precision=precision).astype(self.array.dtype)

    def grouped_gradient(
        self,
        dy: Float[Array, "M out"],
        x: Float[Array, "T in"],
        group_sizes: Int[Array, " X"],
        rows: Int[Array, " M"] | None = None,
    ) -> Float[Array, "X out in"]:
        """dyᵀ·x over each expert's rows, in the array's dtype."""
        return grouped_matmul_dw(dy, x, group_sizes, rows=rows, dtype=self.array.dtype)

    def _decoded(self, x: Array) -> tuple[Array, Array]:
        return x, self.dequantize(x.dtype)

    def rows(self, rows: slice) -> "DenseWeight":
        """Some of the output rows."""
        return DenseWeight(self.array[..., rows, :])

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "*X out in"]:
        """The array in `dtype`."""
        return self.array.astype(dtype)

    experts = dequantize

    def concatenate(self, others: "list[DenseWeight]") -> "DenseWeight | None":
        """One array, or None where dtypes differ."""
        arrays = [self.array, *(other.array for other in others)]
        return DenseWeight(jnp.concatenate(arrays, axis=-2)) if len({array.dtype for array in arrays}) == 1 else None

    def axes(self, out: str | None, into: str | None) -> P:
        """Rows and columns."""
        return P(out, into)

    def splits(self, columns: int) -> bool:
        """Any array does."""
        return True

    def shard(self) -> "DenseWeight":
        """Itself: its shape is the array's."""
        return self

    @property
    def held(self) -> Array:
        """The array."""
        return self.array


def linear(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Float[Array, "... out"]:
    """x·Wᵀ for a plain matrix, in the dtype of x, accumulated in float32 (highest precision for float32)."""
    return plain_product(x, weight.astype(x.dtype), 1)
