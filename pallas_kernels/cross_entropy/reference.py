"""Cross-entropy of whole logits in plain jax.numpy: the oracle, and the operation's result type."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

IGNORE_INDEX = -100
"""The target of a position that has no loss, as in torch and Hugging Face."""


class CrossEntropy(NamedTuple):
    """Sums over the positions that have a target; divide by ``num_targets`` of the whole batch for the mean.

    Attributes:
        loss_sum: Σ (logsumexp(logits) − logits[target]) in nats, float32 (float64 for float64 logits).
        num_targets: number of positions whose target is not ``IGNORE_INDEX``, int32.
        num_correct: how many of them have their target as the first largest logit, int32.
    """

    loss_sum: Float[Array, ""]
    num_targets: Int[Array, ""]
    num_correct: Int[Array, ""]


def cross_entropy(logits: Float[Array, "B S V"], targets: Int[Array, "B S"]) -> CrossEntropy:
    """Cross-entropy of logits that are all in memory, computed in float32 (float64 for float64).

    Args:
        logits: unnormalised log-probabilities.
        targets: the index of the right word, or ``IGNORE_INDEX``.

    Returns:
        The sums.
    """
    logits = logits.astype(jnp.float64 if logits.dtype == jnp.float64 else jnp.float32)
    counted = targets != IGNORE_INDEX
    words = jnp.where(counted, targets, 0)
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    losses = -jnp.take_along_axis(log_probabilities, words[:, :, None], axis=-1)[:, :, 0]
    correct = counted & (jnp.argmax(logits, axis=-1).astype(words.dtype) == words)
    return CrossEntropy(
        jnp.sum(jnp.where(counted, losses, 0.0)),
        jnp.sum(counted, dtype=jnp.int32),
        jnp.sum(correct, dtype=jnp.int32),
    )
