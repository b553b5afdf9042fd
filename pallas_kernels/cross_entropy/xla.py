"""Rows of logits in jax.numpy; arguments as in `chunks`.

A row is read three times (its maximum; its exponentials' sum, target and first maximum; its gradient): comparisons with
an index that is counted along, no gather and no scatter, so XLA fuses each pass. With a scale or a soft cap XLA writes
the logits once for all passes: they are rounded to the products' dtype, or it would keep them in float32.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy.reference import IGNORE_INDEX
from pallas_kernels.cross_entropy.rows import Options, RowStatistics


def forward(logits: Float[Array, "B C V"], targets: Int[Array, "B C"], options: Options) -> RowStatistics:
    """The numbers of the rows."""
    return _numbers(_finished(logits, options), targets, options)


def backward(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"], options: Options
) -> tuple[RowStatistics, Float[Array, "B C V"]]:
    """The numbers of the rows, and the gradient of the loss in the logits."""
    logits32, words = _finished(logits, options), lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    rows = _numbers(logits32, targets, options)
    gradient = jnp.exp(logits32 - rows.logsumexp[:, :, None])
    if options.z_loss:
        gradient = gradient * (1.0 + 2.0 * options.z_loss * rows.logsumexp)[:, :, None]
    gradient = gradient - jnp.where(words == targets[:, :, None], 1.0 - options.label_smoothing, 0.0)
    if options.label_smoothing:
        gradient = gradient - options.label_smoothing / logits.shape[2]
    gradient = options.through(gradient, logits32)
    counted = (targets != IGNORE_INDEX)[:, :, None]
    return rows, jnp.where(counted, gradient, 0.0).astype(logits.dtype)


def _numbers(logits: Float[Array, "B C V"], targets: Int[Array, "B C"], options: Options) -> RowStatistics:
    words = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    logsumexp = maximum[:, :, 0] + jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1))
    target = jnp.sum(jnp.where(words == targets[:, :, None], logits, 0.0), axis=-1)
    first_maximum = jnp.min(jnp.where(logits == maximum, words, logits.shape[2]), axis=-1)
    mean = jnp.mean(logits, axis=-1) if options.label_smoothing else None
    return RowStatistics(logsumexp, target, mean, first_maximum == targets)


def _finished(products: Float[Array, "B C V"], options: Options) -> Float[Array, "B C V"]:
    if options.scale == 1.0 and options.soft_cap is None:
        return products.astype(jnp.float32)
    logits = options.logits(products.astype(jnp.float32)).astype(products.dtype)
    return lax.optimization_barrier(logits).astype(jnp.float32)  # XLA would take the rounding out
