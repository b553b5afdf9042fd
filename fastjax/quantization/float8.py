"""Products of a frozen weight of any format in float8_e4m3fn, forward and to its input, or to its input alone.

Both operands are rounded to float8 with a scale a row, along the axis that is not summed: of x a token and of W an
output feature, or of dy a token and of Wᵀ an input feature. What a weight has for that is its `Weight.float8`; the
weight itself stays in its own format, and adapters read the input that was not rounded (Micikevicius et al., arXiv
2209.05433).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fastjax.parallel import ROWS, local
from fastjax.quantization.weight import Axes, Float8Operand, Weight, after
from fastjax.quantization.weights import MixedWeight, WeightLike, as_weight, matmul
from pallas_kernels import float8

#: The PartitionSpecs of a product in float8: a device has its own rows.
SCALED: Any = float8.Scaled(ROWS, ROWS, P())  # pyright: ignore[reportArgumentType]


#: Values of `base_compute`, and whether the products of the forward pass are in float8 too.
FORWARD = {"float8": True, "float8_backward": False}


def row_specs(operand: Any) -> Any:
    """The PartitionSpec of an array [B, S, …], or of a product in float8.

    Args:
        operand: it.
    """
    return SCALED if isinstance(operand, float8.Scaled) else ROWS


def in_float8(weight: WeightLike, forward: bool = True) -> Weight:
    """A frozen weight whose products with bfloat16 are computed in float8.

    Args:
        weight: of any format; of several, each one's products are its own. One that is in float8 is itself.
        forward: whether the forward pass's are too, or its gradient's alone.
    """
    if isinstance(weight, MixedWeight):
        return MixedWeight(tuple(in_float8(piece, forward) for piece in weight.weights))
    return weight if isinstance(weight, Float8Compute) else Float8Compute(weight, forward=forward)


def decoded_in_float8(weight: WeightLike, forward: bool, *, gradient: bool) -> Weight:
    """A weight in float8 whose operands are made here, for many products.

    Args:
        weight: as of `in_float8`.
        forward: as there; without it the operand of the forward pass is the matrix in bfloat16.
        gradient: whether the transpose is wanted too.
    """
    if isinstance(weight, MixedWeight):
        return MixedWeight(tuple(decoded_in_float8(piece, forward, gradient=gradient) for piece in weight.weights))
    plain = as_weight(weight)
    transposed = plain.float8(True) if gradient else None
    if forward:
        return Float8Compute(weight, plain.float8(False), transposed)
    return Float8Compute(plain.dequantize(jnp.bfloat16), None, transposed, forward=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float8Compute(Weight):
    """A frozen weight that multiplies in float8; for inputs that are not bfloat16 as it does otherwise.

    Attributes:
        weight: packed, or an array.
        operand: the matrix in float8, where it is made for several products; None: each makes its own.
        transposed_operand: its transpose, in the same way.
        forward: whether the products of the forward pass are in float8, as those of its gradient are.
    """

    weight: WeightLike
    operand: Float8Operand | None = None
    transposed_operand: Float8Operand | None = None
    forward: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(out, in)."""
        return self._own.shape

    @property
    def formats(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight's formats."""
        return self._own.formats

    def matmul(self, x: Float[Array, "B S in"]) -> Float[Array, "B S out"]:
        """x·Wᵀ in the dtype of x; a gradient flows to x alone."""
        return _product(x, self) if x.dtype == jnp.bfloat16 else matmul(x, self.weight)

    def transposed(self, dy: Float[Array, "B S out"]) -> Float[Array, "B S in"]:
        """dy·W in the dtype of dy."""
        return _result(dy, self, True) if dy.dtype == jnp.bfloat16 else self._own.transposed(dy)

    def addends(self, x: Float[Array, "N in"]) -> Float[Array, "C N out"]:
        """x·Wᵀ; in float8 one addend, however few the outputs are."""
        return self.matmul(x[None]) if self.forward else self._own.addends(x)

    def matmul_scaled(
        self, x: Float[Array, "B S in"] | float8.Rounded, dtype: jax.typing.DTypeLike | None = None
    ) -> Float[Array, "B S out"] | float8.Scaled:
        """x·Wᵀ; of bfloat16 or float8 with the scales beside the product."""
        if isinstance(x, float8.Rounded) or (self.forward and x.dtype == jnp.bfloat16):
            return _multiply(x, self, False, dtype)
        return super().matmul_scaled(x, dtype)

    def matmul_into(self, x: Float[Array, "B S in"], dtype: jax.typing.DTypeLike) -> Float[Array, "B S out"]:
        """x·Wᵀ in a dtype."""
        if self.forward and x.dtype == jnp.bfloat16:
            return float8.scaled_values(_multiply(x, self, False, dtype)).astype(dtype)
        return self._own.matmul_into(x, dtype)

    def transposed_scaled(self, dy: Float[Array, "B S out"] | float8.Rounded) -> Float[Array, "B S in"] | float8.Scaled:
        """dy·W; of bfloat16 or float8 with the scales beside the product."""
        if isinstance(dy, float8.Rounded) or dy.dtype == jnp.bfloat16:
            return _multiply(dy, self, True)
        return self.transposed(dy)

    def reads_rounded(self, transposed: bool) -> bool:
        """Unless the other operand is to be multiplied before it is rounded."""
        if not transposed:
            return self.forward
        ready = self.transposed_operand
        return not self._own.float8_by_terms if ready is None else ready.factors is None

    def rows(self, rows: slice) -> Weight:
        """Some of the output rows."""
        return in_float8(self._own.rows(rows).held, self.forward)

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`, as its format decodes it."""
        return self._own.dequantize(dtype)

    def concatenate(self, others: "list[Float8Compute]") -> Weight | None:
        """One weight below the other, or None where their formats do not allow it."""
        joined = self._own.concatenate([other._own for other in others])
        return None if joined is None else in_float8(joined.held, self.forward)

    def axes(self, out: str | None, into: str | None) -> Axes:
        """The axes of the weight's arrays."""
        return Float8Compute(self._own.axes(out, into), forward=self.forward)

    @property
    def _own(self) -> Weight:
        return as_weight(self.weight)


@jax.custom_vjp
def _product(x: Array, weight: Float8Compute) -> Array:
    return _result(x, weight, False) if weight.forward else matmul(x, weight.weight)


def _forward(x: Array, weight: Float8Compute) -> tuple[Array, Float8Compute]:
    return _product(x, weight), weight


def _backward(weight: Float8Compute, dy: Array) -> tuple[Array, None]:
    return _result(dy, weight, True), None


_product.defvjp(_forward, _backward)


def _result(x: Array, weight: Float8Compute, transposed: bool) -> Array:
    return float8.scaled_values(_multiply(x, weight, transposed)).astype(jnp.bfloat16)


def _multiply(
    x: Array | float8.Rounded, weight: Float8Compute, transposed: bool, dtype: jax.typing.DTypeLike | None = None
) -> float8.Scaled:
    """x·Wᵀ, or x·W, each device with its own rows of x; of the codes in a dtype, None: bfloat16."""
    ready = weight.transposed_operand if transposed else weight.operand

    def product(x: Any, given: Any) -> float8.Scaled:
        if ready is None:
            [given], x = after([given], x)
            given = as_weight(given).float8(transposed)
        matrix, scales, factors = given
        if factors is not None:
            x = (x.astype(jnp.float32) * factors[None, None, :]).astype(x.dtype)
        # XLA must not fuse a decode into the product.
        matrix = jax.lax.optimization_barrier(matrix)
        rows = x if isinstance(x, float8.Rounded) else float8.quantize_rows(x)
        return float8.matmul_scaled(*rows, matrix, scales, dtype=jnp.bfloat16 if dtype is None else dtype)

    return local(product, in_specs=(ROWS, P()), out_specs=SCALED)(x, weight.weight if ready is None else ready)
