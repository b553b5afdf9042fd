"""Trained rows of a frozen table: embeddings of some tokens, or their rows of the head (PEFT's trainable tokens).

The trained rows take the place of the table's own wherever one of their tokens is looked up or scored. They alone have
a gradient and an optimizer's state; the table is neither copied nor written to.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from fastjax.lora.params import SavedParam
from fastjax.quantization.dense import linear


class TrainableTokens(nnx.Module):
    """Trained rows of a table.

    Attributes:
        indices: the tokens, in the order of the rows.
        trainable_tokens_delta: [N, E], the rows themselves; the name is PEFT's, which once stored differences.
    """

    def __init__(self, indices: Sequence[int], rows: Float[Array, "N E"]):
        self.indices = tuple(int(index) for index in indices)
        self.trainable_tokens_delta = SavedParam(rows)

    def embed(self, tokens: Int[Array, "B S"], base: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """The embeddings of `tokens`, whose rows in the frozen table are `base`; in base's dtype."""
        order = np.argsort(self.indices)
        ordered = jnp.asarray(np.asarray(self.indices, np.int32)[order])
        nearest = jnp.minimum(jnp.searchsorted(ordered, tokens), len(self.indices) - 1)
        trained = jnp.take(ordered, nearest) == tokens
        rows = jnp.take(self.trainable_tokens_delta[...], jnp.take(jnp.asarray(order), nearest), axis=0)
        return jnp.where(trained[:, :, None], rows.astype(base.dtype), base)

    def score(self, hidden: Float[Array, "B S E"], logits: Float[Array, "B S V"]) -> Float[Array, "B S V"]:
        """`logits`, the frozen head's of `hidden`, with those of the trained rows; in their dtype."""
        scores = linear(hidden, self.trainable_tokens_delta[...]).astype(logits.dtype)
        return logits.at[:, :, np.asarray(self.indices, np.int32)].set(scores, unique_indices=True)
