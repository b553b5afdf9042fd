"""Formats as fake quantisers: matrices in float32 to the values that they decode to, by name.

Gradients pass straight through (Bengio et al., arXiv 1308.3432), clipped at a format's range.

The arithmetic is that of the exact quantisers in `convert.formats`, operation by operation: float32, true quotients,
scales rounded to the dtype that holds them before codes are made, everything rounded half to even. Where scales come
from a group's own range, 7.5 or 127.5 steps to each side, 15 from end to end, or 448, no value lies out of it: the
largest may come out half a step beyond the largest code, and counts as inside. Blocks in E2M1 have values out of range.

`GGML` has ggml's reference quantisers (ggml-quants.c, and the gguf library's), which `convert.gguf` writes with: codes
are made with the scale in float32, and decoded with it in float16.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from fastjax.quantization.nf4 import NF4Weight
from pallas_kernels.rounding import kept, quotient, round_through

#: Of scales that are kept: subnormal numbers, which some devices take for zero, never matter.
SMALLEST = 2.0**-90
_E4M3, _E2M1 = 448.0, 6.0  # largest magnitudes
#: Between neighbouring magnitudes of E2M1: the bound, whether a tie goes up (to an even code), and the difference.
_E2M1_STEPS = (
    (0.25, False, 0.5),
    (0.75, True, 0.5),
    (1.25, False, 0.5),
    (1.75, True, 0.5),
    (2.5, False, 1.0),
    (3.5, True, 1.0),
    (5.0, False, 2.0),
)


class Scheme(abc.ABC):
    """A format as a fake quantiser.

    Attributes:
        block: columns of a block, of which a row consists; None: any number of columns will do.
    """

    block: int | None = None

    def why_not(self, columns: int) -> str | None:
        """The reason, a clause, that rows of so many columns cannot be held; None: they can."""
        whole = self.block is None or columns % self.block == 0
        return None if whole else f"rows of {columns} columns are not whole blocks of {self.block}"

    @abc.abstractmethod
    def __call__(
        self, w: Float[Array, "out in"], top: Float[Array, ""], dtype: DTypeLike
    ) -> tuple[Float[Array, "out in"], Bool[Array, "out in"] | None]:
        """The decoded values, float32, and where a value lies inside of the format's range; None: everywhere.

        What is not finite becomes NaN, whatever code a format would have for it: no code hides it from the loss.

        Args:
            w: float32.
            top: the largest magnitude of w and of the matrices that are served as one with it.
            dtype: of scales, where the format does not say, and of a folder that the values decode in.
        """


@dataclasses.dataclass(frozen=True)
class Integers(Scheme):
    """Integers with a scale for each group of a row, symmetric or with zero points.

    Attributes:
        bits: of a code.
        block: columns that share a scale; None: the whole row.
        zero_points: a group's range runs from its smallest to its largest value, 0 included, not from -amax to amax.
    """

    bits: int
    block: int | None
    zero_points: bool = False

    def __call__(self, w, top, dtype):
        """The decoded values, as `Scheme.__call__`."""
        groups = w.reshape(w.shape[0], -1, self.block or w.shape[1])
        low, high = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        if self.zero_points:
            least = jnp.minimum(jnp.min(groups, 2, keepdims=True), 0.0)
            most = jnp.maximum(jnp.max(groups, 2, keepdims=True), 0.0)
            scale = _scale(most - least, high - low, dtype)
            zero = jnp.round(jnp.clip(low - quotient(least, scale), low, high))
        else:
            scale = _scale(jnp.max(jnp.abs(groups), 2, keepdims=True), (high - low) / 2, dtype)
            zero = jnp.zeros_like(scale)
        codes = jnp.round(jnp.clip(quotient(groups, scale) + zero, low, high))
        return _unhidden(((codes - zero) * scale).reshape(w.shape), w), None


@dataclasses.dataclass(frozen=True)
class FP8(Scheme):
    """E4M3 with a scale for each block of the matrix, or one for those served together.

    Attributes:
        tile: rows and columns that share a scale, the last fewer, None: all columns; or None: one scale.
    """

    tile: tuple[int, int | None] | None

    def __call__(self, w, top, dtype):
        """The decoded values, as `Scheme.__call__`."""
        if self.tile is None:
            scale = _scale(top, _E4M3, dtype)[None, None]
            return _unhidden(_e4m3(jnp.clip(quotient(w, scale), -_E4M3, _E4M3)) * scale, w), None
        rows, columns = self.tile[0], self.tile[1] or w.shape[1]
        padded = jnp.pad(w, ((0, -w.shape[0] % rows), (0, -w.shape[1] % columns)))
        blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        scale = _scale(jnp.max(jnp.abs(blocks), (1, 3), keepdims=True), _E4M3, dtype)
        values = _e4m3(jnp.clip(quotient(blocks, scale), -_E4M3, _E4M3)) * scale
        return _unhidden(values.reshape(padded.shape)[: w.shape[0], : w.shape[1]], w), None


@dataclasses.dataclass(frozen=True)
class NF4(Scheme):
    """NF4 in blocks of 64 with nested scales, through the quantiser that quantised weights themselves go through."""

    def __call__(self, w, top, dtype):
        """The decoded values, as `Scheme.__call__`."""
        return _unhidden(NF4Weight.quantize(w.astype(dtype)).dequantize(jnp.float32), w), None


@dataclasses.dataclass(frozen=True)
class MXFP4(Scheme):
    """E2M1 in blocks of 32 with a power of two as scale (OCP Microscaling Formats 1.0)."""

    block = 32

    def __call__(self, w, top, dtype):
        """The decoded values, as `Scheme.__call__`."""
        blocks = w.reshape(w.shape[0], -1, 32)
        largest = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), 2, keepdims=True), jnp.int32)
        exponent = jnp.clip((largest >> 23) - 127 - 2, -126, 126)  # 2 is the exponent of the largest value, 6
        scaled = blocks * _power(-exponent)
        values = _e2m1(jnp.clip(scaled, -_E2M1, _E2M1)) * _power(exponent)
        return _unhidden(values.reshape(w.shape), w), (jnp.abs(scaled) <= _E2M1).reshape(w.shape)


@dataclasses.dataclass(frozen=True)
class NVFP4(Scheme):
    """E2M1 in blocks of 16 with a scale in E4M3, and one in float32 for the matrices served together.

    Attributes:
        by_row: whether each row has the float32 scale by itself, as tokens have.
    """

    by_row: bool = False
    block = 16

    def __call__(self, w, top, dtype):
        """The decoded values, as `Scheme.__call__`."""
        blocks = w.reshape(w.shape[0], -1, 16)
        amax = jnp.max(jnp.abs(blocks), 2, keepdims=True)
        top = jnp.max(amax, 1, keepdims=True) if self.by_row else top[None, None, None]
        whole = jnp.where(top < SMALLEST, 1.0, quotient(jnp.full_like(top, _E4M3 * _E2M1), jnp.maximum(top, SMALLEST)))
        block_scale = _e4m3(jnp.minimum(whole * quotient(amax, _E2M1), _E4M3))
        scale = quotient(jnp.where(block_scale == 0, 0.125, block_scale), whole)
        scaled = quotient(blocks, scale)
        values = _e2m1(jnp.clip(scaled, -_E2M1, _E2M1)) * scale
        return _unhidden(values.reshape(w.shape), w), (jnp.abs(scaled) <= _E2M1).reshape(w.shape)


@dataclasses.dataclass(frozen=True)
class GGML(Scheme):
    """Q4_0 or Q8_0: blocks of 32 with a scale in float16.

    Attributes:
        bits: 4: codes from -8 to 7, of which -8 is the block's largest number with its sign, halves rounded up; or 8:
            from -127 to 127, halves rounded away from zero.
        folder: dtype of the folder that the file is made of, to which values are rounded before; None: they are.
    """

    bits: int
    folder: DTypeLike | None = None
    block = 32

    def __call__(self, w, top, dtype):
        """The decoded values, as `Scheme.__call__`."""
        blocks = round_through(w, self.folder).reshape(w.shape[0], -1, 32)
        if self.bits == 4:
            scale = jnp.take_along_axis(blocks, jnp.argmax(jnp.abs(blocks), 2, keepdims=True), 2) / -8.0
        else:
            scale = quotient(jnp.max(jnp.abs(blocks), 2, keepdims=True), 127.0)
        reciprocal = jnp.where(scale == 0, 0.0, quotient(jnp.ones_like(scale), scale))
        scaled = kept(blocks * reciprocal, blocks != blocks)  # not fused with what is added to it
        if self.bits == 4:
            codes = jnp.minimum(jnp.floor(scaled + 8.5), 15.0) - 8.0
        else:
            size, whole = jnp.abs(scaled), jnp.floor(jnp.abs(scaled))
            codes = jnp.sign(scaled) * (whole + jnp.where(size - whole >= 0.5, 1.0, 0.0))
        stored = round_through(scale, jnp.float16)
        values = jnp.where(stored == 0, 0.0, codes * stored)  # a reciprocal of next to nothing may be infinite
        return _unhidden(values.reshape(w.shape), w), None


#: Formats of weights by name.
WEIGHTS: Mapping[str, Scheme] = {
    "int4-32": Integers(4, 32),
    "int4-128": Integers(4, 128),
    "int4-32-zeros": Integers(4, 32, zero_points=True),
    "int4-128-zeros": Integers(4, 128, zero_points=True),
    "int8": Integers(8, None),
    "fp8-row": FP8((1, None)),
    "fp8-tensor": FP8(None),
    "fp8-block": FP8((128, 128)),
    "nf4": NF4(),
    "mxfp4": MXFP4(),
    "nvfp4": NVFP4(),
    "q4_0": GGML(4),
    "q8_0": GGML(8),
}
#: Formats of activations by name; each token has scales of its own.
ACTIVATIONS: Mapping[str, Scheme] = {
    "int8": Integers(8, None),
    "fp8": FP8((1, None)),
    "fp8-128": FP8((1, 128)),
    "nvfp4": NVFP4(by_row=True),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fake_quantize(w: Float[Array, "out in"], scheme: Scheme, dtype: DTypeLike = jnp.float32) -> Float[Array, "out in"]:
    """The values that a matrix decodes to after quantisation, in its dtype.

    The gradient passes as it is, but where a value lies outside of the format's range it is 0; scales count as
    constants. What is not finite becomes NaN.

    Args:
        w: the matrix, in float32, bfloat16 or float16.
        scheme: the format.
        dtype: of its scales, as `Scheme` takes it.
    """
    return _forward(w, scheme, dtype)[0]


def _forward(w, scheme, dtype):
    wide = w.astype(jnp.float32)
    values, inside = scheme(wide, jnp.max(jnp.abs(wide)), dtype)
    return values.astype(w.dtype), inside


def _backward(scheme, dtype, inside, dvalues):
    return (dvalues if inside is None else jnp.where(inside, dvalues, jnp.zeros_like(dvalues)),)


fake_quantize.defvjp(_forward, _backward)


def _scale(largest: Float[Array, "..."], steps: float, dtype: DTypeLike) -> Float[Array, "..."]:
    """`convert.formats.scales.divided`: largest / steps rounded to `dtype`, and its epsilon below `SMALLEST`."""
    scale = round_through(quotient(largest, steps), dtype)
    return jnp.where(scale < SMALLEST, jnp.float32(jnp.finfo(dtype).eps), scale)


def _unhidden(values: Float[Array, "out in"], w: Float[Array, "out in"]) -> Float[Array, "out in"]:
    """NaN where `w` is not finite: a clipped code hides infinity, a comparison or a maximum that skips it NaN."""
    return jnp.where(jnp.isfinite(w), values, jnp.nan)


def _e4m3(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return round_through(x, jnp.float8_e4m3fn)


def _e2m1(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest value of E2M1, ties to the even code.

    Args:
        x: float32 in [-6, 6].
    """
    size, value = jnp.abs(x), jnp.zeros_like(x)
    for bound, up, step in _E2M1_STEPS:
        value = value + jnp.where(size >= bound if up else size > bound, step, 0.0)
    return jnp.where(x < 0, -value, value)


def _power(exponent: Array) -> Float[Array, "..."]:
    """2 to an int32 exponent from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
