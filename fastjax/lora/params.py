"""Kinds of weights, and the adapters of a projection and of an embedding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fastjax.quantization.dense import linear
from fastjax.quantization.weights import WeightLike, dequantize


class BaseParam(nnx.Param):
    """A weight of the checkpoint."""


class Constant(nnx.Variable):
    """An array of the checkpoint that is never trained."""


class LoraParam(nnx.Param):
    """A weight of an adapter."""


class SavedParam(nnx.Param):
    """A table, or rows of it, that an adapter trains whole (`modules_to_save`, `trainable_token_indices`)."""


class LoraLinear(nnx.Module):
    """The adapter of one projection, or of that of all experts, whose arrays lead with their axis X.

    Attributes:
        lora_A: [R, in].
        lora_B: [out, R].
        magnitude: [out] (DoRA), or None.
        scaling: lora_alpha / r, or lora_alpha / √r.
        dropout: probability of a zeroed input in training.
        largest: of adapters that are joined (`lora.joined`), the largest rank of one; 0: it is one adapter.
        chosen: of adapters that are joined (`lora.joined`), which rank products each token has, as
            `rank_products.Matrices` has it; None: every token has all.
    """

    def __init__(
        self, lora_A: Array, lora_B: Array, magnitude: Array | None, *, scaling: float, dropout: float, largest: int = 0
    ):
        self.scaling, self.dropout, self.largest = scaling, dropout, largest
        self.lora_A, self.lora_B = LoraParam(lora_A), LoraParam(lora_B)
        self.magnitude = None if magnitude is None else LoraParam(magnitude)
        self.chosen: Constant | None = None

    @property
    def matrices(self) -> tuple[Array, ...]:
        """A, B, and what is chosen, as `rank_products.Matrices` has them."""
        both = self.lora_A[...], self.lora_B[...]
        return both if self.chosen is None else (*both, self.chosen[...])

    def column_scale(self, weight: WeightLike, rows: slice) -> Float[Array, " out"] | None:
        """DoRA's factor of each output: magnitude over the norm of W + s·B·A, float32; None without DoRA.

        The norm counts as a constant (arXiv 2402.09353, section 4.3).

        Args:
            weight: the frozen weight.
            rows: the projection's in it.
        """
        if self.magnitude is None:
            return None
        a, b = self.lora_A[...].astype(jnp.float32), self.lora_B[...].astype(jnp.float32)
        full = dequantize(weight, jnp.float32)[rows] + self.scaling * linear(b, a.T)
        return self.magnitude[...].astype(jnp.float32) / jax.lax.stop_gradient(jnp.linalg.norm(full, axis=1))


class LoraEmbedding(nnx.Module):
    """The adapter of an embedding table: lora_embedding_A [R, V], lora_embedding_B [E, R]."""

    def __init__(self, lora_embedding_A: Array, lora_embedding_B: Array, magnitude: Array | None, *, scaling: float):
        self.scaling = scaling
        self.lora_embedding_A, self.lora_embedding_B = LoraParam(lora_embedding_A), LoraParam(lora_embedding_B)
        self.magnitude = None if magnitude is None else LoraParam(magnitude)

    def __call__(
        self, tokens: Int[Array, "B S"], base: Float[Array, "B S E"], table: Float[Array, "V E"]
    ) -> Float[Array, "B S E"]:
        """The embeddings of `tokens`, whose rows in the frozen `table` are `base`."""
        product = jnp.take(self.lora_embedding_A[...].T, tokens, axis=0).astype(base.dtype)
        b = self.lora_embedding_B[...].astype(jnp.float32)
        delta = linear(product, b * self.scaling)
        if self.magnitude is None:
            return base + delta
        a = self.lora_embedding_A[...].astype(jnp.float32)
        full = table.astype(jnp.float32) + self.scaling * linear(a.T, b)
        norm = jax.lax.stop_gradient(jnp.linalg.norm(full, axis=0))
        scale = (self.magnitude[...].astype(jnp.float32) / norm).astype(base.dtype)[None, None, :]
        return scale * (base + delta)
