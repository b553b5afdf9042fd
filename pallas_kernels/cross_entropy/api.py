"""Cross-entropy of a language model's head, chunk by chunk, with the gradient computed in the forward pass.

The logits of 8,192 tokens over 128,256 words are 2 GiB in bfloat16; neither they nor their gradient need ever exist
whole. A scan over pieces of the sequence projects one piece, takes its loss, and, when the loss is being
differentiated, sends the gradient of its logits straight back through the projection. The backward pass then only
multiplies by the incoming number. A frozen head costs two GEMMs this way, where recomputing the logits costs three.

With p = softmax(logits), the gradient of the summed loss in the logits is p − onehot(target), zero at ignored
positions. It is rounded to the logits' dtype before it goes back: were it float32 beside a bfloat16 head, the GEMMs
of the backward pass would run in tf32, several times slower.

The pieces are cut along the sequence, so the batch axis keeps its sharding. References: Liger Kernel (arXiv
2410.10989), Cut Cross-Entropy (arXiv 2411.09009).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels.cross_entropy.reference import IGNORE_INDEX, CrossEntropy

Project = Callable[[Any, Any, Float[Array, "B C E"]], Float[Array, "B C V"]]


def chunked_cross_entropy(
    project: Project,
    trainable: PyTree,
    frozen: PyTree,
    hidden: Float[Array, "B S E"],
    targets: Int[Array, "B S"],
    *,
    chunk_size: int,
) -> CrossEntropy:
    """Cross-entropy of ``project(trainable, frozen, hidden)`` against targets, without the whole logits.

    Do not wrap it in ``jax.checkpoint``: its forward pass already leaves nothing to recompute, and would run twice.

    Args:
        project: (trainable, frozen, hidden [B, C, E]) -> logits [B, C, V], for any C; positions must be independent.
            Every array that it needs goes through trainable or frozen: it must not close over traced values.
        trainable: the head's differentiated arrays: a pytree of floating-point arrays, or an empty one.
        frozen: the head's other arrays: any pytree, packed codes included. Its gradient is zero by definition.
        hidden: the decoder's last activations.
        targets: index of the right word at each position, int32; ``IGNORE_INDEX`` (−100) where there is no loss. Any
            other index outside the vocabulary makes the loss NaN.
        chunk_size: positions a chunk, see ``chunk_size_for``. A sequence that it does not divide is padded.

    Returns:
        The sums; ``loss_sum`` alone is differentiable, in trainable and hidden. The gradient of trainable is
        accumulated over the chunks in float32 and returned in each leaf's dtype.

    Raises:
        ValueError: shapes that do not fit, a chunk size below 1, or a trainable leaf that is not floating-point.
    """
    if hidden.ndim != 3 or targets.shape != hidden.shape[:2] or not hidden.shape[1]:
        raise ValueError(
            "chunked_cross_entropy: hidden must be [batch, length, width] with length >= 1 and targets "
            f"[batch, length], got {hidden.shape} and {targets.shape}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunked_cross_entropy: chunk_size must be at least 1, got {chunk_size}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainable):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                "chunked_cross_entropy: trainable leaves must be floating-point, got "
                f"{leaf.dtype} at {jax.tree_util.keystr(path) or 'the root'}; pass it in frozen"
            )
    return _cross_entropy(project, min(chunk_size, hidden.shape[1]), trainable, frozen, hidden, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    project: Project, chunk_size: int, trainable: PyTree, frozen: PyTree, hidden: Array, targets: Array
) -> CrossEntropy:
    """The loss alone, without differentiation."""
    padded_hidden, padded_targets = _pad(hidden, targets, chunk_size)

    def step(sums: CrossEntropy, start: Array) -> tuple[CrossEntropy, None]:
        logits = project(trainable, frozen, _slice(padded_hidden, start, chunk_size))
        chunk_sums, _ = _loss(logits, _slice(padded_targets, start, chunk_size))
        return _add(sums, chunk_sums), None

    sums, _ = lax.scan(step, _zeros(hidden), _starts(padded_hidden, chunk_size))
    return sums


def _forward(
    project: Project, chunk_size: int, trainable: PyTree, frozen: PyTree, hidden: Array, targets: Array
) -> tuple[CrossEntropy, tuple[PyTree, Array]]:
    """The loss, and as residuals its gradients in trainable and hidden."""
    padded_hidden, padded_targets = _pad(hidden, targets, chunk_size)

    def step(
        carry: tuple[CrossEntropy, PyTree, Array], start: Array
    ) -> tuple[tuple[CrossEntropy, PyTree, Array], None]:
        sums, dtrainable, dhidden = carry
        piece = _slice(padded_hidden, start, chunk_size)
        logits, pull_back = jax.vjp(lambda trainable, piece: project(trainable, frozen, piece), trainable, piece)
        chunk_sums, dlogits = _loss(logits, _slice(padded_targets, start, chunk_size))
        dtrainable_chunk, dpiece = pull_back(dlogits)
        dtrainable = jax.tree.map(lambda total, part: total + part.astype(jnp.float32), dtrainable, dtrainable_chunk)
        dhidden = lax.dynamic_update_slice_in_dim(dhidden, dpiece, start, axis=1)
        return (_add(sums, chunk_sums), dtrainable, dhidden), None

    zeros = jax.tree.map(lambda leaf: lax.full_like(hidden, 0, jnp.float32, leaf.shape), trainable)
    carry = (_zeros(hidden), zeros, jnp.zeros_like(padded_hidden))
    (sums, dtrainable, dhidden), _ = lax.scan(step, carry, _starts(padded_hidden, chunk_size))
    dtrainable = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), dtrainable, trainable)
    return sums, (dtrainable, dhidden[:, : hidden.shape[1]])


def _backward(
    project: Project, chunk_size: int, residuals: tuple[PyTree, Array], cotangent: CrossEntropy
) -> tuple[PyTree, None, Array, None]:
    dtrainable, dhidden = jax.tree.map(
        lambda gradient: (cotangent.loss_sum * gradient.astype(jnp.float32)).astype(gradient.dtype), residuals
    )
    return dtrainable, None, dhidden, None


_cross_entropy.defvjp(_forward, _backward)


def _loss(logits: Float[Array, "B C V"], targets: Int[Array, "B C"]) -> tuple[CrossEntropy, Float[Array, "B C V"]]:
    """The sums of one chunk and the gradient of its loss in the logits, in the logits' dtype.

    All maths is float32. A row is read three times (its maximum; its exponentials' sum, target and first maximum; its
    gradient): comparisons with an index that is counted along, no gather and no scatter, so XLA fuses each pass.
    """
    logits32 = logits.astype(jnp.float32)
    words = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    vocab = logits.shape[2]
    counted = targets != IGNORE_INDEX
    is_target = words == targets[:, :, None]
    maximum = jnp.max(logits32, axis=-1, keepdims=True)
    logsumexp = maximum + jnp.log(jnp.sum(jnp.exp(logits32 - maximum), axis=-1, keepdims=True))  # [B, C, 1]
    target_logit = jnp.sum(jnp.where(is_target, logits32, 0.0), axis=-1)
    first_maximum = jnp.min(jnp.where(logits32 == maximum, words, vocab), axis=-1)
    losses = jnp.where((targets >= 0) & (targets < vocab), logsumexp[:, :, 0] - target_logit, jnp.nan)
    sums = CrossEntropy(
        jnp.sum(jnp.where(counted, losses, 0.0)),
        jnp.sum(counted, dtype=jnp.int32),
        jnp.sum(counted & (first_maximum == targets), dtype=jnp.int32),
    )
    dlogits = jnp.exp(logits32 - logsumexp) - is_target.astype(jnp.float32)
    return sums, jnp.where(counted[:, :, None], dlogits, 0.0).astype(logits.dtype)


def _pad(hidden: Array, targets: Array, chunk_size: int) -> tuple[Array, Array]:
    """Whole chunks: the positions that are added have no loss."""
    missing = -hidden.shape[1] % chunk_size
    if not missing:
        return hidden, targets
    hidden = jnp.pad(hidden, ((0, 0), (0, missing), (0, 0)))
    return hidden, jnp.pad(targets, ((0, 0), (0, missing)), constant_values=IGNORE_INDEX)


def _slice(array: Array, start: Array, chunk_size: int) -> Array:
    return lax.dynamic_slice_in_dim(array, start, chunk_size, axis=1)


def _starts(padded: Array, chunk_size: int) -> Array:
    return jnp.arange(0, padded.shape[1], chunk_size, dtype=jnp.int32)


def _zeros(like: Array) -> CrossEntropy:
    """Zero sums that vary over the same devices as ``like`` (inside shard_map a scan's carry must say so)."""
    count = lax.full_like(like, 0, jnp.int32, ())
    return CrossEntropy(lax.full_like(like, 0, jnp.float32, ()), count, count)


def _add(left: CrossEntropy, right: CrossEntropy) -> CrossEntropy:
    return CrossEntropy(*(a + b for a, b in zip(left, right, strict=True)))
