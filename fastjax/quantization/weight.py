"""What the model asks of a frozen or trained matrix, whatever its format."""

import abc
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

#: Logical axes of a weight's arrays: the weight itself with a PartitionSpec of logical names for each leaf.
Axes: TypeAlias = Any


class Weight(abc.ABC):
    """A matrix [out, in] in some format.

    A packed one is a registered dataclass. Its static fields describe one layer, whatever axes its arrays lead with
    when layers are stacked. What is not overridden here serves frozen matrices.

    Attributes:
        shape: (out, in).
    """

    shape: tuple[int, ...]

    @property
    @abc.abstractmethod
    def formats(self) -> tuple[str, ...]:
        """What the numbers are held in, as reports call it: "NF4", or a dtype."""

    @abc.abstractmethod
    def matmul(self, x: Float[Array, "B S in"]) -> Float[Array, "B S out"]:
        """x·Wᵀ in the dtype of x, accumulated in float32; in true float32 where x is float32."""

    def transposed(self, dy: Float[Array, "B S out"]) -> Float[Array, "B S in"]:
        """dy·W in the dtype of dy, the gradient that `matmul` passes to its input."""
        # The product is linear in x; it is not computed, only its transpose is.
        _, pullback = jax.vjp(self.matmul, jnp.zeros((*dy.shape[:-1], self.shape[1]), dy.dtype))
        return pullback(dy)[0]

    def gradient(self, dy: Float[Array, "B S out"], x: Float[Array, "B S in"]) -> Any:
        """dyᵀ·x in the weight's dtype, as the tree that the model holds; None for a frozen one."""
        return None

    @abc.abstractmethod
    def rows(self, rows: slice) -> "Weight":
        """Some of the output rows."""

    @abc.abstractmethod
    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`: the values that the format decodes to, cast."""

    @abc.abstractmethod
    def concatenate(self, others: "list[Any]") -> "Weight | None":
        """One weight with others of its class below, or None where one set of arrays cannot hold them."""

    @abc.abstractmethod
    def axes(self, out: str | None, into: str | None) -> Axes:
        """The logical axes of the arrays of one layer.

        Args:
            out: name of the output rows' axis.
            into: name of the input columns' axis.
        """

    @property
    def held(self) -> Any:
        """What the model's tree holds: the weight itself, or a plain array."""
        return self
