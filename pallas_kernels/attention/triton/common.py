"""Shared parts of the three Triton kernels: the static part of a call, exponentials, the soft cap, dropout."""

import dataclasses
import math
import struct

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention import dropout
from pallas_kernels.attention.call import Options
from pallas_kernels.attention.triton.config import Tiles
from pallas_kernels.attention.triton.loads import Ref

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The static part of a kernel; grids are (tile, head, row of the batch).

    Attributes:
        options: the call's.
        queries: S.
        keys: T.
        heads: H.
        groups: query heads of a key head, H / K.
        size: D of queries and keys.
        value_size: D of values.
        tiles: block sizes.
        interpret: whether the kernel runs in jax.numpy.
    """

    options: Options
    queries: int
    keys: int
    heads: int
    groups: int
    size: int
    value_size: int
    tiles: Tiles
    interpret: bool

    @property
    def query_limit(self) -> int | None:
        """S where a tile of queries can reach beyond it."""
        return self.queries if self.queries % self.tiles.queries else None

    @property
    def key_limit(self) -> int | None:
        """T where a tile of keys can reach beyond it."""
        return self.keys if self.keys % self.tiles.keys else None

    @property
    def exponent(self) -> float:
        """Factor from `capped` products to exponents of 2."""
        cap = self.options.logits_soft_cap
        return (self.options.scale if cap is None else cap) * LOG2_E

    def capped(self, products: Array) -> Array:
        """tanh(scale · q kᵀ / cap), or the products themselves without a cap."""
        cap = self.options.logits_soft_cap
        return products if cap is None else jnp.tanh(products * (self.options.scale / cap))

    def uncapped(self, capped: Array, gradients: Array) -> Array:
        """The gradients of scale · q kᵀ from those of the logits."""
        return gradients if self.options.logits_soft_cap is None else gradients * (1.0 - capped * capped)

    def exp2(self, x: Array, *, times: float = 1.0, plus: Array | None = None) -> Array:
        """2^(x · times + plus) in at most two instructions; results below 2⁻¹²⁶ are 0.

        Written as assembly because XLA's Triton fuses no multiplication with an addition, and because keeping denormal
        results takes three instructions more.
        """
        plus = jnp.zeros_like(x) if plus is None else jnp.broadcast_to(plus, x.shape)
        if self.interpret:
            return jnp.exp2(x * times + plus)
        factor = struct.unpack("<I", struct.pack("<f", times))[0]
        [result] = pltriton.elementwise_inline_asm(
            f"{{ .reg .f32 e; fma.rn.f32 e, $1, 0f{factor:08X}, $2; ex2.approx.ftz.f32 $0, e; }}",
            args=[x, plus],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return result

    def seeds_of_row(self, seed_ref: Ref | None) -> tuple[Array, Array] | None:
        """Dropout's seeds of the first head of this row of the batch; None without dropout."""
        if seed_ref is None:
            return None
        return seed_ref[0] + (pl.program_id(2) * self.heads).astype(jnp.uint32), seed_ref[1]

    def kept(self, seeds: tuple[Array, Array], head: Array, queries: Array, keys: Array) -> Array:
        """Dropout's mask: bool of the shape to which `queries` and `keys` broadcast."""
        places = (number.astype(jnp.uint32) for number in (head, queries, keys))
        return dropout.random_bits(seeds, *places) >= jnp.uint32(dropout.threshold(self.options.dropout_rate))


def offset_of_row(offset_ref: Ref) -> Array:
    """The position of this row's first query among the keys: one number for all rows, or one for each."""
    return offset_ref[pl.program_id(2)] if offset_ref.shape[0] > 1 else offset_ref[0]
