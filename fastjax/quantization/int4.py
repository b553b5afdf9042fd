"""The int4 weight: a checkpoint's 4-bit integers with a scale, and maybe a zero point, for each group of a row.

A value is the code less the zero point times the scale, in float32, rounded to the dtype of the folder's weights and
cast to the product's.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from convert.formats.int4 import OFFSET, Int4Tensor
from fastjax.quantization.decoded import RowsWeight, from_runs, in_runs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight(RowsWeight):
    """A frozen matrix [out, in] in 4 bits.

    Attributes:
        codes: uint8 [out, in/2], each group in two runs of values.
        scales: [out, groups] in the file's dtype.
        zeros: int8 [out, groups], or None.
        shape: (out, in).
        dtype: of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: UInt8[Array, "out in/2"]
    scales: Float[Array, "out groups"]
    zeros: Int[Array, "out groups"] | None
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def formats(self) -> tuple[str, ...]:
        """INT4."""
        return ("INT4",)

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`: float32 code less zero × float32 scale in its own dtype, cast."""
        codes = from_runs(self.codes, self.scales.shape[-1]).astype(jnp.float32)
        zeros = jnp.float32(OFFSET)
        if self.zeros is not None:
            zeros = zeros + self.zeros[..., None].astype(jnp.float32)
        return self.cast((codes - zeros) * self.scales[..., None].astype(jnp.float32), dtype)

    @classmethod
    def from_tensor(cls, tensor: Int4Tensor) -> "Int4Weight":
        """From a checkpoint's tensor, without loss.

        Args:
            tensor: codes, scales and zero points as `convert` reads them.
        """
        rows, groups = tensor.scales.shape
        codes = in_runs(jnp.asarray(tensor.codes).reshape(rows, groups, -1)).reshape(rows, -1)
        zeros = None if tensor.zeros is None else jnp.asarray(tensor.zeros)
        return cls(codes, jnp.asarray(tensor.scales), zeros, tensor.shape, tensor.dtype)
