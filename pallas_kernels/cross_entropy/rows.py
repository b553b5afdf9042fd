"""What a row of logits gives: numbers for the loss and, where it is differentiated, the gradient in the logits.

With p = softmax(logits), Z = Σ exp(logits), ε the label smoothing and c the coefficient of the z-loss, a row's loss and
its gradient are

    (1 − ε)·(log Z − logits[target]) + ε·(log Z − mean(logits)) + c·log² Z
    p·(1 + 2c·log Z) − (1 − ε)·onehot(target) − ε/V

and zero where the target is ``IGNORE_INDEX``. Label smoothing as in Hugging Face's Trainer; z-loss: PaLM (arXiv
2204.02311).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cross_entropy.reference import IGNORE_INDEX, CrossEntropy


class Terms(NamedTuple):
    """The loss's terms beside the cross-entropy.

    Attributes:
        label_smoothing: ε.
        z_loss: c.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


class Rows(NamedTuple):
    """Numbers of each row of logits; without meaning where the target is ``IGNORE_INDEX``.

    Attributes:
        logsumexp: float32.
        target: the target's logit, float32.
        mean: of the row's logits, float32; None without label smoothing.
        correct: whether the target is the first largest logit.
    """

    logsumexp: Float[Array, "B C"]
    target: Float[Array, "B C"]
    mean: Float[Array, "B C"] | None
    correct: Bool[Array, "B C"]


def sums_of(rows: Rows, targets: Int[Array, "B C"], vocab: int, terms: Terms) -> CrossEntropy:
    """The sums over rows; NaN where a target is outside the vocabulary.

    Args:
        rows: their numbers.
        targets: the index of the right word, or ``IGNORE_INDEX``.
        vocab: V.
        terms: of the loss.
    """
    counted = targets != IGNORE_INDEX
    right = jnp.where((targets >= 0) & (targets < vocab), rows.logsumexp - rows.target, jnp.nan)
    losses, squares = right, jnp.square(rows.logsumexp)
    if rows.mean is not None:
        smooth = rows.logsumexp - rows.mean
        losses = (1.0 - terms.label_smoothing) * right + terms.label_smoothing * smooth
    if terms.z_loss:
        losses = losses + terms.z_loss * squares
    loss_sum, cross_entropy_sum, z_loss_sum = (
        jnp.sum(jnp.where(counted, values, 0.0)) for values in (losses, right, squares)
    )
    correct = jnp.sum(counted & rows.correct, dtype=jnp.int32)
    return CrossEntropy(loss_sum, jnp.sum(counted, dtype=jnp.int32), correct, cross_entropy_sum, z_loss_sum)
