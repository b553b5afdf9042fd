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
        loss_sum: of the loss, label smoothing and z-loss included, float32 (float64 for float64 logits).
        num_targets: number of positions whose target is not ``IGNORE_INDEX``, int32.
        num_correct: how many of them have their target as the first largest logit, int32.
        cross_entropy_sum: Σ (logsumexp(logits) − logits[target]) in nats, in the dtype of `loss_sum`.
        z_loss_sum: Σ logsumexp(logits)², without its coefficient.
    """

    loss_sum: Float[Array, ""]
    num_targets: Int[Array, ""]
    num_correct: Int[Array, ""]
    cross_entropy_sum: Float[Array, ""]
    z_loss_sum: Float[Array, ""]


def cross_entropy(
    logits: Float[Array, "B S V"], targets: Int[Array, "B S"], *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> CrossEntropy:
    """Cross-entropy of logits that are all in memory, computed in float32 (float64 for float64).

    Args:
        logits: unnormalised log-probabilities.
        targets: the index of the right word, or ``IGNORE_INDEX``.
        label_smoothing: share ε of the loss that is the mean of −log p over the vocabulary.
        z_loss: factor of logsumexp(logits)², which is added.

    Returns:
        The sums.
    """
    logits = logits.astype(jnp.float64 if logits.dtype == jnp.float64 else jnp.float32)
    counted = targets != IGNORE_INDEX
    words = jnp.where(counted, targets, 0)
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    right = -jnp.take_along_axis(log_probabilities, words[:, :, None], axis=-1)[:, :, 0]
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    losses = (1 - label_smoothing) * right + z_loss * squares
    if label_smoothing:  # without it a word may have no probability at all
        losses = losses - label_smoothing * jnp.mean(log_probabilities, axis=-1)
    correct = counted & (jnp.argmax(logits, axis=-1).astype(words.dtype) == words)
    loss_sum, cross_entropy_sum, z_loss_sum = (
        jnp.sum(jnp.where(counted, values, 0.0)) for values in (losses, right, squares)
    )
    return CrossEntropy(
        loss_sum,
        jnp.sum(counted, dtype=jnp.int32),
        jnp.sum(correct, dtype=jnp.int32),
        cross_entropy_sum,
        z_loss_sum,
    )


def token_log_probs(logits: Float[Array, "B S V"], targets: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """Log-probabilities of the targets, 0 where it is ``IGNORE_INDEX``; float32 (float64 for float64).

    Args:
        logits: unnormalised log-probabilities.
        targets: the index of the right word, or ``IGNORE_INDEX``.
    """
    logits = logits.astype(jnp.float64 if logits.dtype == jnp.float64 else jnp.float32)
    counted = targets != IGNORE_INDEX
    words = jnp.where(counted, targets, 0)[:, :, None]
    return jnp.where(counted, jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), words, axis=-1)[:, :, 0], 0.0)
