"""The FP8 weight: a checkpoint's 8-bit codes, also integers, with a scale for each block, row or matrix, as a pytree.

A value is the code in float32 times its scale in float32, rounded to the dtype of the folder's weights and cast to the
product's.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from convert.formats.eight_bits_format import Int8Tensor
from convert.formats.fp8 import FP8Tensor
from fastjax.quantization.decoded import DecodedWeight
from fastjax.quantization.weight import Float8Operand
from pallas_kernels.float8.scales import MAX, scale_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8Weight(DecodedWeight):
    """A frozen matrix [out, in] in 8 bits.

    Attributes:
        codes: float8_e4m3fn, float8_e5m2 or int8 [out, in].
        scales: float32 [ceil(out / rows of a block), ceil(in / columns of a block)].
        block: rows and columns of a block.
        shape: (out, in).
        dtype: of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: Array
    scales: Float[Array, "..."]
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def formats(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The codes' dtype."""
        return (str(self.codes.dtype),)

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`: float32 code × float32 scale in its own dtype, cast."""
        scales = _of_elements(self.scales, self.block, self.shape)
        return self.cast(self.codes.astype(jnp.float32) * scales, dtype)

    def float8(self, transposed: bool) -> Float8Operand:
        """The codes as they are where scales are of rows or of the matrix and codes float8_e4m3fn; else rounded again.

        Scales of the product's rows multiply its result, those of its terms the other operand. Scales of blocks would
        leave one product for each block of terms, with its sum in memory: the codes are rounded once more, to a scale
        for each row, from 8 bits to 8 bits in one pass.
        """
        if self.codes.dtype != jnp.float8_e4m3fn:
            return super().float8(transposed)
        if self.block[1] < self.shape[1]:
            return _by_operand_row(self, transposed)
        scales = jnp.repeat(self.scales.reshape(-1), self.block[0])[: self.shape[0]]
        if transposed:
            return Float8Operand(self.codes.T, jnp.ones(self.shape[1], jnp.float32), scales)
        return Float8Operand(self.codes, scales)

    @property
    def float8_by_terms(self) -> bool:
        """Where a row or the matrix has a scale."""
        return self.codes.dtype == jnp.float8_e4m3fn and self.block[1] >= self.shape[1]

    def rows(self, rows: slice) -> DecodedWeight:
        """Some of the output rows."""
        return super(FP8Weight, _by_row(self)).rows(rows)

    def concatenate(self, others: Sequence["FP8Weight"]) -> DecodedWeight | None:
        """One weight below the other, or None where their formats do not allow it.

        Blocks stay as they are where the parts have whole ones of one size; else each row gets its own scales.
        """
        weights = [self, *others]
        aligned = all(w.block == self.block and w.shape[0] % w.block[0] == 0 for w in weights)
        first, *rest = weights if aligned else map(_by_row, weights)
        return super(FP8Weight, first).concatenate(rest)

    @classmethod
    def from_tensor(cls, tensor: FP8Tensor | Int8Tensor) -> "FP8Weight":
        """From a checkpoint's tensor, without loss.

        Args:
            tensor: codes and scales as `convert` reads them.
        """
        rows, columns = tensor.codes.shape
        codes, scales = jax.device_put((tensor.codes, tensor.scale.values))
        return cls(codes, scales, tensor.scale.block, (rows, columns), tensor.dtype)


def _of_elements(scales: Array, block: tuple[int, int], shape: tuple[int, int]) -> Float[Array, "out in"]:
    """Each element's scale."""
    return jnp.repeat(jnp.repeat(scales, block[0], axis=0)[: shape[0]], block[1], axis=1)[:, : shape[1]]


def _by_operand_row(weight: FP8Weight, transposed: bool) -> Float8Operand:
    """Codes with scales of blocks by a power of two for each row of the operand, which no code exceeds."""
    axis = 0 if transposed else 1
    scales, inverse = scale_of(MAX * jnp.max(weight.scales, axis=axis))
    factors = weight.scales * jnp.expand_dims(inverse, axis)
    values = weight.codes.astype(jnp.float32) * _of_elements(factors, weight.block, weight.shape)
    codes = values.astype(jnp.float8_e4m3fn)
    rows = jnp.repeat(scales, weight.block[1 - axis])[: weight.shape[1 - axis]]
    return Float8Operand(codes.T if transposed else codes, rows)


def _by_row(weight: FP8Weight) -> FP8Weight:
    """A weight with a scale for each row in the place of blocks, of equal values."""
    rows = weight.shape[0]
    scales = jnp.repeat(weight.scales, weight.block[0], axis=-2)[..., :rows, :]
    return dataclasses.replace(weight, scales=scales, block=(1, min(weight.block[1], weight.shape[1])))
