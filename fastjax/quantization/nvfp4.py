"""The NVFP4 weight: a checkpoint's E2M1 codes, a scale in E4M3 for 16 of them, and a scale for the matrix.

A value is the code in float32 times its scale in float32, which is the group's divided by (or times) the matrix's,
rounded to the dtype of the folder's weights and cast to the product's. Products are in the activations' dtype: four-bit
arithmetic, which Blackwell has, is none of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt8

from convert.formats.nvfp4 import NVFP4Tensor
from fastjax.quantization.decoded import RowsWeight, from_runs, in_runs
from fastjax.quantization.mxfp4 import e2m1
from pallas_kernels.rounding import kept, quotient


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Weight(RowsWeight):
    """A frozen matrix [out, in] in 4 bits.

    Attributes:
        codes: uint8 [out, in/2], each block of 16 in two runs of values.
        scales: float8_e4m3fn [out, in/16].
        global_scales: float32 [out, 1], the matrix's, one a row so that matrices with several can be joined.
        divides: whether scales are divided by them, or multiplied.
        shape: (out, in).
        dtype: of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: UInt8[Array, "out in/2"]
    scales: Float[Array, "out in/16"]
    global_scales: Float[Array, "out 1"]
    divides: bool = dataclasses.field(metadata={"static": True})
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def formats(self) -> tuple[str, ...]:
        """NVFP4."""
        return ("NVFP4",)

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`: float32 value × float32 scale in its own dtype, cast."""
        scales = self.scales.astype(jnp.float32)
        # Kept, or XLA would multiply by the code first.
        whole = self.global_scales
        scales = kept(quotient(scales, whole) if self.divides else scales * whole, scales != scales)
        return self.cast(e2m1(from_runs(self.codes, scales.shape[-1])) * scales[..., None], dtype)

    def axes(self, out: str | None, into: str | None) -> "NVFP4Weight":
        """Codes and scales have the matrix's axes, the global scales that of the rows."""
        return dataclasses.replace(super().axes(out, into), global_scales=P(out, None))

    @classmethod
    def from_tensor(cls, tensor: NVFP4Tensor) -> "NVFP4Weight":
        """From a checkpoint's tensor, without loss.

        Args:
            tensor: codes and scales as `convert` reads them.
        """
        rows, blocks = tensor.scales.shape
        codes = in_runs(jnp.asarray(tensor.codes).reshape(rows, blocks, -1)).reshape(rows, -1)
        whole = jnp.broadcast_to(jnp.asarray(tensor.global_scale), (rows, 1))
        return cls(codes, jnp.asarray(tensor.scales), whole, tensor.divides, tensor.shape, tensor.dtype)
