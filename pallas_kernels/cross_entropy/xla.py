"""Rows of logits in jax.numpy; arguments as in `implementations`.

A row is read three times (its maximum; its exponentials' sum, target and first maximum; its gradient): comparisons with
an index that is counted along, no gather and no scatter, so XLA fuses each pass.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy.reference import IGNORE_INDEX
from pallas_kernels.cross_entropy.rows import Rows, Terms


def forward(logits: Float[Array, "B C V"], targets: Int[Array, "B C"], terms: Terms) -> Rows:
    """The numbers of the rows."""
    logits = logits.astype(jnp.float32)
    words = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    logsumexp = maximum[:, :, 0] + jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1))
    target = jnp.sum(jnp.where(words == targets[:, :, None], logits, 0.0), axis=-1)
    first_maximum = jnp.min(jnp.where(logits == maximum, words, logits.shape[2]), axis=-1)
    mean = jnp.mean(logits, axis=-1) if terms.label_smoothing else None
    return Rows(logsumexp, target, mean, first_maximum == targets)


def backward(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"], terms: Terms
) -> tuple[Rows, Float[Array, "B C V"]]:
    """The numbers of the rows, and the gradient of the loss in the logits."""
    rows = forward(logits, targets, terms)
    logits32, words = logits.astype(jnp.float32), lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    gradient = jnp.exp(logits32 - rows.logsumexp[:, :, None])
    if terms.z_loss:
        gradient = gradient * (1.0 + 2.0 * terms.z_loss * rows.logsumexp)[:, :, None]
    gradient = gradient - jnp.where(words == targets[:, :, None], 1.0 - terms.label_smoothing, 0.0)
    if terms.label_smoothing:
        gradient = gradient - terms.label_smoothing / logits.shape[2]
    counted = (targets != IGNORE_INDEX)[:, :, None]
    return rows, jnp.where(counted, gradient, 0.0).astype(logits.dtype)
