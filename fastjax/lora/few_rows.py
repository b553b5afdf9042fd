"""The units' way with a few rows, as in decoding, on one NVIDIA GPU: no pass of its own for any small part of it.

A unit takes it where it is not differentiated and the kernels of `pallas_kernels.few_rows` serve; elsewhere nothing
changes. Rank products come as addends, and so do the large products (`Weight.addends`): the next pass adds them up.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fastjax.lora.rank_products import Matrices, PartSpec, choice_of
from pallas_kernels import few_rows


class Addends(NamedTuple):
    """Rank products of rows [B, S], as `rank_products` arranges them, in shares.

    Attributes:
        shares: float32.
        batch: B.
        adapters: which they are of.
    """

    shares: Float[Array, "C N PK"]
    batch: int
    adapters: few_rows.Adapters

    def added(self, dtype: jnp.dtype) -> Float[Array, "B S PR"]:
        """The rank products."""
        total = self.adapters.unfolded(jnp.sum(self.shares, axis=0).astype(dtype))
        return total.reshape(self.batch, -1, total.shape[-1])


def adapters_of(parts: Sequence[PartSpec], matrices: Matrices) -> few_rows.Adapters:
    """The parts' adapters as the kernels take them."""
    pairs = [matrices[part.name][:2] if part.rank else (None, None) for part in parts]
    lora_A, lora_B = zip(*pairs, strict=True)
    rows, scalings, chosen = [part.rows for part in parts], [part.scaling for part in parts], choice_of(matrices)
    chosen, largest = None if chosen is None else flat(chosen), max(part.largest for part in parts)
    return few_rows.Adapters(lora_A, lora_B, tuple(rows), tuple(scalings), chosen, largest or None)


def served(x: Float[Array, "B S in"], adapters: few_rows.Adapters, *features: int) -> bool:
    """Whether the kernels serve a call.

    Args:
        x: the input.
        adapters: of the projection.
        features: numbers of features that are read or written beside those of x and of the parts.
    """
    features = x.shape[-1], *adapters.parts, *features
    rows = math.prod(x.shape[:-1])
    return few_rows.why_not(rows, x.dtype, adapters, *features) is None


def flat(x: Float[Array, "B S F"]) -> Float[Array, "N F"]:
    """The rows one below the other."""
    return x.reshape(-1, x.shape[-1])
