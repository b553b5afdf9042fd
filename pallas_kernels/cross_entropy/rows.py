"""Statistics of a row of the head's products for the loss and, where that is differentiated, its gradient in them.

The logits are the products times a scale, and then cap · tanh(· / cap) where there is a soft cap. With p =
softmax(logits), Z = Σ exp(logits), ε the label smoothing and c the coefficient of the z-loss, a row's loss and its
gradient in the logits are

    (1 − ε)·(log Z − logits[target]) + ε·(log Z − mean(logits)) + c·log² Z
    p·(1 + 2c·log Z) − (1 − ε)·onehot(target) − ε/V

and zero where the target is ``IGNORE_INDEX``. Label smoothing as in Hugging Face's Trainer; z-loss: PaLM (arXiv
2204.02311).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cross_entropy.reference import IGNORE_INDEX, CrossEntropy


class Options(NamedTuple):
    """The static part of a call.

    Attributes:
        label_smoothing: ε.
        z_loss: c.
        scale: factor of the products, greater than 0.
        soft_cap: of the scaled products; None: none.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, products: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """The logits of products, both float32."""
        scaled = products * self.scale if self.scale != 1.0 else products
        return scaled if self.soft_cap is None else self.soft_cap * jnp.tanh(scaled / self.soft_cap)

    def through(self, gradient: Float[Array, "*rows V"], logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """The gradient in the products from that in the logits."""
        if self.soft_cap is not None:
            gradient = gradient * (1.0 - jnp.square(logits / self.soft_cap))
        return gradient * self.scale if self.scale != 1.0 else gradient


class RowStatistics(NamedTuple):
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


def log_probs_of(rows: RowStatistics, targets: Int[Array, "B C"], vocab: int) -> Float[Array, "B C"]:
    """Log-probabilities of the targets; 0 where it is ``IGNORE_INDEX``, NaN where it is outside the vocabulary.

    Args:
        rows: their numbers.
        targets: the index of the right word, or ``IGNORE_INDEX``.
        vocab: V.
    """
    right = jnp.where((targets >= 0) & (targets < vocab), rows.target - rows.logsumexp, jnp.nan)
    return jnp.where(targets == IGNORE_INDEX, 0.0, right)


def sums_of(rows: RowStatistics, targets: Int[Array, "B C"], vocab: int, options: Options) -> CrossEntropy:
    """The sums over rows; NaN where a target is outside the vocabulary.

    Args:
        rows: their numbers.
        targets: the index of the right word, or ``IGNORE_INDEX``.
        vocab: V.
        options: of the call.
    """
    counted = targets != IGNORE_INDEX
    right = -log_probs_of(rows, targets, vocab)
    losses, squares = right, jnp.square(rows.logsumexp)
    if rows.mean is not None:
        smooth = rows.logsumexp - rows.mean
        losses = (1.0 - options.label_smoothing) * right + options.label_smoothing * smooth
    if options.z_loss:
        losses = losses + options.z_loss * squares
    loss_sum, cross_entropy_sum, z_loss_sum = (
        jnp.sum(jnp.where(counted, values, 0.0)) for values in (losses, right, squares)
    )
    correct = jnp.sum(counted & rows.correct, dtype=jnp.int32)
    return CrossEntropy(loss_sum, jnp.sum(counted, dtype=jnp.int32), correct, cross_entropy_sum, z_loss_sum)
