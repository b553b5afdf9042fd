"""Log-probabilities of a language model's targets, chunk by chunk, with a cotangent for each of them.

A loss that is not a sum over the tokens, such as one of preferences, weights every token's gradient by a number that is
known in the backward pass alone. That number is a factor of a row: of the logits' gradient, and so of the gradient in
hidden. The forward pass therefore takes, beside the log-probabilities, the gradient in hidden for cotangents of one,
while it has the chunk's logits, and the backward pass multiplies its rows. A frozen head costs two GEMMs, as in
``chunked_cross_entropy``. A trained head's gradient is a sum over the rows, with their factors: the backward pass
computes the logits again, and two further GEMMs.

The logits' gradient stays in the logits' dtype, that of the GEMMs, after its rows are multiplied too: a second rounding
of as many bits. Before that the factors are divided by the largest one, so that no gradient under- or overflows in
float16 whatever the loss's scale.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels.cross_entropy.chunks import HeadCall, Project, checked_call, rows_of, scan_chunks, zeros_in_chunks
from pallas_kernels.cross_entropy.rows import Options, log_probs_of
from pallas_kernels.transformations import custom_vjp


def token_log_probs(
    project: Project,
    trainable: PyTree,
    frozen: PyTree,
    hidden: Float[Array, "B S E"],
    targets: Int[Array, "B S"],
    *,
    chunk_size: int,
    logits_scale: float = 1.0,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B S"]:
    """Log-probabilities of the targets under ``project(trainable, frozen, hidden)``, without the whole logits.

    Do not wrap it in ``jax.checkpoint``: its forward pass would run twice.

    Args:
        project: as for ``chunked_cross_entropy``.
        trainable: the head's differentiated arrays: a pytree of floating-point arrays, or an empty one.
        frozen: the head's other arrays: any pytree. Its gradient is zero by definition.
        hidden: the decoder's last activations.
        targets: index of the right word at each position, int32, or ``IGNORE_INDEX`` (−100). Any other index outside
            the vocabulary makes its log-probability NaN.
        chunk_size: positions a chunk, see ``chunk_size_for``. A sequence that it does not divide is padded.
        logits_scale: factor, greater than 0, of what project returns.
        logits_soft_cap: the scaled logits become cap · tanh(logits / cap); None: they stay.
        implementation: None, "triton" or "xla".

    Returns:
        float32, 0 where the target is ``IGNORE_INDEX``; differentiable in trainable and hidden. The gradient of
        trainable is accumulated over the chunks in float32 and returned in each leaf's dtype.

    Raises:
        ValueError: shapes that do not fit, a number out of range, or a trainable leaf that is not floating-point.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    options = Options(scale=logits_scale, soft_cap=logits_soft_cap)
    call = checked_call("token_log_probs", project, trainable, hidden, targets, chunk_size, options, implementation)
    return _log_probs(call, trainable, frozen, hidden, targets)


@custom_vjp(nondiff_argnums=(0,))
def _log_probs(call: HeadCall, trainable: PyTree, frozen: PyTree, hidden: Array, targets: Array) -> Array:
    """The log-probabilities alone, without differentiation."""

    def step(carry: None, _: Array, piece: Array, chunk_targets: Array) -> tuple[None, Array]:
        logits = call.project(trainable, frozen, piece)
        rows = rows_of(call, logits, chunk_targets, differentiated=False)
        return carry, log_probs_of(rows, chunk_targets, logits.shape[2])

    return _whole(scan_chunks(call, step, None, hidden, targets)[1], hidden.shape[1])


def _forward(call: HeadCall, trainable: PyTree, frozen: PyTree, hidden: Array, targets: Array):
    """The log-probabilities, and the residuals: −d log p / d hidden, and of a trained head what its gradient needs."""

    def step(dhidden: Array, start: Array, piece: Array, chunk_targets: Array) -> tuple[Array, Array]:
        logits, pull_back = jax.vjp(lambda piece: call.project(trainable, frozen, piece), piece)
        rows, dlogits = rows_of(call, logits, chunk_targets, differentiated=True)
        (dpiece,) = pull_back(dlogits)
        dhidden = lax.dynamic_update_slice_in_dim(dhidden, dpiece, start, axis=1)
        return dhidden, log_probs_of(rows, chunk_targets, logits.shape[2])

    dhidden, log_probs = scan_chunks(call, step, zeros_in_chunks(call, hidden), hidden, targets)
    head = (frozen, hidden, targets) if jax.tree.leaves(trainable) else None
    return _whole(log_probs, hidden.shape[1]), (dhidden[:, : hidden.shape[1]], trainable, head)


def _backward(call: HeadCall, residuals: tuple, cotangent: Float[Array, "B S"]):
    dhidden, trainable, head = residuals
    dhidden = (-cotangent[:, :, None] * dhidden.astype(jnp.float32)).astype(dhidden.dtype)
    dtrainable = trainable if head is None else _head_gradient(call, trainable, head, cotangent)
    return dtrainable, None, dhidden, None


_log_probs.defvjp(_forward, _backward)


def _head_gradient(
    call: HeadCall, trainable: PyTree, head: tuple[PyTree, Array, Array], cotangent: Float[Array, "B S"]
) -> PyTree:
    """The gradient in the head's trained arrays; the logits are computed again."""
    frozen, hidden, targets = head
    largest = jnp.max(jnp.abs(cotangent), initial=0)
    factors = cotangent / jnp.where(largest > 0, largest, 1.0)

    def step(
        dtrainable: PyTree, _: Array, piece: Array, chunk_targets: Array, chunk_factors: Array
    ) -> tuple[PyTree, None]:
        logits, pull_back = jax.vjp(lambda trainable: call.project(trainable, frozen, piece), trainable)
        _, dlogits = rows_of(call, logits, chunk_targets, differentiated=True)
        dlogits = (dlogits.astype(jnp.float32) * chunk_factors[:, :, None]).astype(dlogits.dtype)
        (part,) = pull_back(dlogits)
        return jax.tree.map(lambda total, part: total + part.astype(jnp.float32), dtrainable, part), None

    zeros = jax.tree.map(lambda leaf: lax.full_like(hidden, 0, jnp.float32, leaf.shape), trainable)
    total, _ = scan_chunks(call, step, zeros, hidden, targets, factors)
    return jax.tree.map(lambda total, leaf: (-largest * total).astype(leaf.dtype), total, trainable)


def _whole(chunks: Float[Array, "N B C"], length: int) -> Float[Array, "B S"]:
    """Stacked chunks as a sequence, without the positions that were added."""
    joined = jnp.moveaxis(chunks, 0, 1)
    return joined.reshape(joined.shape[0], math.prod(joined.shape[1:]))[:, :length]
