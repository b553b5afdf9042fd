"""The MXFP4 weight: matrices and experts as they are stored, 4 bits a value and a power of two for 32 of them.

References: Open Compute Project, Microscaling Formats (MX) Specification 1.0.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from convert.errors import ConvertError
from convert.formats.mxfp4 import BLOCK, MXFP4Tensor
from fastjax.quantization.decoded import RowsWeight, from_runs, in_runs

#: The largest scale at which every code is finite in float32.
_LARGEST_SCALE = 127 + 125
#: The mean square of E2M1's eight magnitudes, 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
_MEAN_SQUARE = 68.5 / 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4Weight(RowsWeight):
    """A frozen matrix [out, in] in 4 bits; arrays of experts lead with their axis.

    Attributes:
        codes: uint8 [X, out, in/2]: byte j of a block of 32 holds value j in its low four bits and value j + 16 in its
            high ones, so that a decoded block is two runs of values. (A file's byte holds two
            neighbours.)
        scales: uint8 [X, out, in/32], exponents with a bias of 127.
        shape: (out, in).
        dtype: of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: UInt8[Array, "X out in/2"]
    scales: UInt8[Array, "X out in/32"]
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def formats(self) -> tuple[str, ...]:
        """MXFP4."""
        return ("MXFP4",)

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """One expert's matrix in `dtype`: float32 value × power of two in its own dtype, cast."""
        values = e2m1(from_runs(self.codes, self.scales.shape[-1]))
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
        codes = in_runs(jnp.asarray(tensor.codes)).reshape(*experts, rows, -1)
        return cls(codes, jnp.asarray(tensor.scales), (rows, columns), tensor.dtype)

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


def e2m1(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
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
