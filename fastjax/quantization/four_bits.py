"""Weights as checkpoints hold them in 4 bits: integers, MXFP4, NVFP4, with scales for parts of a row.

A value is the code times its scale in float32, rounded to the dtype of the folder's weights and cast to the product's.
Products are in the activations' dtype: four-bit arithmetic, which Blackwell has, is none of it. A block's codes are
two runs of values: byte j holds value j in its low four bits, and in its high ones the value half a block on, where a
file's byte holds two neighbours.

References: Open Compute Project, Microscaling Formats (MX) Specification 1.0.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from convert.errors import ConvertError
from convert.formats.int4 import OFFSET, Int4Tensor
from convert.formats.mxfp4 import BLOCK, MXFP4Tensor
from convert.formats.nvfp4 import NVFP4Tensor
from fastjax.quantization.decoded import DecodedWeight
from pallas_kernels.rounding import kept, quotient

#: The largest scale at which every code is finite in float32.
_LARGEST_SCALE = 127 + 125
#: The mean square of E2M1's eight magnitudes, 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
_MEAN_SQUARE = 68.5 / 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight(DecodedWeight):
    """A frozen matrix [out, in] in 4 bits.

    Attributes:
        codes: uint8 [out, in/2], in groups of values that share a scale.
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

    formats = ("INT4",)

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`: float32 code less zero × float32 scale in its own dtype, cast."""
        codes = _from_runs(self.codes, self.scales.shape[-1]).astype(jnp.float32)
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
        codes = _in_runs(jax.device_put(tensor.codes).reshape(rows, groups, -1)).reshape(rows, -1)
        zeros = None if tensor.zeros is None else jax.device_put(tensor.zeros)
        return cls(codes, jax.device_put(tensor.scales), zeros, tensor.shape, tensor.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4Weight(DecodedWeight):
    """A frozen matrix [out, in] in 4 bits; arrays of experts lead with their axis.

    Attributes:
        codes: uint8 [X, out, in/2], in blocks of 32.
        scales: uint8 [X, out, in/32], exponents with a bias of 127.
        shape: (out, in).
        dtype: of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: UInt8[Array, "X out in/2"]
    scales: UInt8[Array, "X out in/32"]
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    formats = ("MXFP4",)

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """One expert's matrix in `dtype`: float32 value × power of two in its own dtype, cast."""
        values = _e2m1(_from_runs(self.codes, self.scales.shape[-1]))
        return self.cast(values * _power_of_two(self.scales)[..., None], dtype)

    @classmethod
    def from_tensor(cls, tensor: MXFP4Tensor) -> "MXFP4Weight":
        """From a checkpoint's tensor, without loss.

        Args:
            tensor: codes and scales of a matrix or of all experts as `convert` reads them.

        Raises:
            ConvertError: a scale that is NaN or makes infinity.
        """
        if (largest := int(tensor.scales.max(initial=0))) > _LARGEST_SCALE:
            raise ConvertError(
                f"an MXFP4 tensor {list(tensor.shape)}: expected finite values, got the scale 2^{largest - 127}"
            )
        *experts, rows, columns = tensor.shape
        codes = _in_runs(jax.device_put(tensor.codes)).reshape(*experts, rows, -1)
        return cls(codes, jax.device_put(tensor.scales), (rows, columns), tensor.dtype)

    @classmethod
    def random(cls, key: PRNGKeyArray, shape: tuple[int, int, int], dtype: str, deviation: float) -> "MXFP4Weight":
        """Codes at random, without the values of a matrix: all codes alike, each scale one of two neighbours.

        Args:
            key: random state.
            shape: (experts, out, in), rows of whole blocks.
            dtype: of the decoded weight.
            deviation: standard deviation of the values.

        Raises:
            ConvertError: rows that are not whole blocks.
        """
        if shape[2] % BLOCK:
            raise ConvertError(f"MXFP4: expected rows of whole blocks of {BLOCK}, got {shape[2]} values")
        codes, scales = _random(key, shape, deviation)
        return cls(codes, scales, shape[1:], dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Weight(DecodedWeight):
    """A frozen matrix [out, in] in 4 bits.

    Attributes:
        codes: uint8 [out, in/2], in blocks of 16.
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

    formats = ("NVFP4",)

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`: float32 value × float32 scale in its own dtype, cast."""
        scales = self.scales.astype(jnp.float32)
        # Kept, or XLA would multiply by the code first.
        whole = self.global_scales
        scales = kept(quotient(scales, whole) if self.divides else scales * whole, scales != scales)
        return self.cast(_e2m1(_from_runs(self.codes, scales.shape[-1])) * scales[..., None], dtype)

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
        codes = _in_runs(jax.device_put(tensor.codes).reshape(rows, blocks, -1)).reshape(rows, -1)
        whole = jnp.broadcast_to(jax.device_put(tensor.global_scale), (rows, 1))
        return cls(codes, jax.device_put(tensor.scales), whole, tensor.divides, tensor.shape, tensor.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: PRNGKeyArray, shape: tuple[int, int, int], deviation: float) -> tuple[Array, Array]:
    """Codes and scales: of two powers of two, the larger as often as the mean square asks."""
    experts, out, columns = shape
    square = deviation**2 / _MEAN_SQUARE
    low = math.floor(math.log2(square) / 2)
    ours, theirs = jax.random.split(key)
    codes = jax.random.bits(ours, (experts, out, columns // 2), jnp.uint8)
    larger = jax.random.bernoulli(theirs, (square / 4.0**low - 1) / 3, (experts, out, columns // BLOCK))
    return codes, larger.astype(jnp.uint8) + jnp.uint8(127 + low)


def _e2m1(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """E2M1 by its bits: sign, two of the exponent with a bias of 1, one of the fraction. Faster than a table of 16."""
    sign, rest = (codes >> 3).astype(jnp.int32) << 31, (codes & 7).astype(jnp.int32)
    # 0.5, the one subnormal number, has its exponent but not its fraction. Minima, not jnp.where, whose constants are
    # arrays as large as the weight, which JAX takes out of the loop over the layers and keeps.
    nonzero, normal = jnp.minimum(rest, 1), jnp.minimum(jnp.maximum(rest - 1, 0), 1)
    bits = nonzero * (126 << 23) + normal * (rest << 22)
    return jax.lax.bitcast_convert_type(sign | bits, jnp.float32)


def _power_of_two(scales: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """2^(scale - 127) by its bits; the least is subnormal."""
    bits = scales.astype(jnp.int32) << 23
    return jax.lax.bitcast_convert_type(jnp.maximum(bits, 1 << 22), jnp.float32)


@jax.jit
def _in_runs(codes: UInt8[Array, "... blocks bytes"]) -> UInt8[Array, "... blocks bytes"]:
    """A file's codes of four bits, neighbours in a byte, in two runs: byte j of a block of 2n has values j and j + n.

    Args:
        codes: the even value in the low four bits.
    """
    values = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    half = codes.shape[-1]
    return values[..., :half] | values[..., half:] << 4


def _from_runs(codes: UInt8[Array, "... bytes"], blocks: int) -> UInt8[Array, "... blocks values"]:
    """The codes of each block, one a byte.

    Args:
        codes: of `_in_runs`, the blocks of a row one after the other.
        blocks: in a row.
    """
    bytes_ = codes.reshape(*codes.shape[:-1], blocks, -1)
    return jnp.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)
