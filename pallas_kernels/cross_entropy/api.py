"""Cross-entropy of a language model's head, chunk by chunk, with the gradient computed in the forward pass.

The logits of 8,192 tokens over 128,256 words are 2 GiB in bfloat16; neither they nor their gradient need ever exist
whole. A scan over pieces of the sequence projects one piece, takes its loss, and, when the loss is being
differentiated, sends the gradient of its logits straight back through the projection. The backward pass then only
multiplies by the incoming number. A frozen head costs two GEMMs this way, where recomputing the logits costs three.

What is done with a piece's logits is in `rows.py`. Their gradient is rounded to the logits' dtype before it goes back:
were it float32 beside a bfloat16 head, the GEMMs of the backward pass would run in tf32, several times slower.
Implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more; one read and one write of the logits, in place;
- ``xla``: everything else.

References: Liger Kernel (arXiv 2410.10989), Cut Cross-Entropy (arXiv 2411.09009).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels.cross_entropy.chunks import HeadCall, Project, checked_call, rows_of, scan_chunks, zeros_in_chunks
from pallas_kernels.cross_entropy.reference import CrossEntropy
from pallas_kernels.cross_entropy.rows import Options, sums_of
from pallas_kernels.transformations import custom_vjp


def chunked_cross_entropy(
    project: Project,
    trainable: PyTree,
    frozen: PyTree,
    hidden: Float[Array, "B S E"],
    targets: Int[Array, "B S"],
    *,
    chunk_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: float = 1.0,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> CrossEntropy:
    """Cross-entropy of ``project(trainable, frozen, hidden)`` against targets, without the whole logits.

    Do not wrap it in ``jax.checkpoint``: its forward pass already leaves nothing to recompute, and would run twice.

    Args:
        project: (trainable, frozen, hidden [B, C, E]) -> logits [B, C, V], before scale and cap, for any C; positions
            must be independent. Every array that it needs goes through trainable or frozen: it must not close over
            traced values.
        trainable: the head's differentiated arrays: a pytree of floating-point arrays, or an empty one.
        frozen: the head's other arrays: any pytree, packed codes included. Its gradient is zero by definition.
        hidden: the decoder's last activations.
        targets: index of the right word at each position, int32; ``IGNORE_INDEX`` (−100) where there is no loss. Any
            other index outside the vocabulary makes the loss NaN.
        chunk_size: positions a chunk, see ``chunk_size_for``. A sequence that it does not divide is padded.
        label_smoothing: share of the loss that is the mean of −log p over the vocabulary, in [0, 1).
        z_loss: factor, at least 0, of logsumexp(logits)², which is added to each position's loss.
        logits_scale: factor, greater than 0, of what project returns.
        logits_soft_cap: the scaled logits become cap · tanh(logits / cap); None: they stay.
        implementation: None, "triton" or "xla".

    Returns:
        The sums; ``loss_sum`` alone is differentiable, in trainable and hidden. The gradient of trainable is
        accumulated over the chunks in float32 and returned in each leaf's dtype.

    Raises:
        ValueError: shapes that do not fit, a number out of range, or a trainable leaf that is not floating-point.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    options = Options(label_smoothing, z_loss, logits_scale, logits_soft_cap)
    name = "chunked_cross_entropy"
    call = checked_call(name, project, trainable, hidden, targets, chunk_size, options, implementation)
    return _cross_entropy(call, trainable, frozen, hidden, targets)


@custom_vjp(nondiff_argnums=(0,))
def _cross_entropy(call: HeadCall, trainable: PyTree, frozen: PyTree, hidden: Array, targets: Array) -> CrossEntropy:
    """The loss alone, without differentiation."""

    def step(sums: CrossEntropy, _: Array, piece: Array, chunk_targets: Array) -> tuple[CrossEntropy, None]:
        logits = call.project(trainable, frozen, piece)
        rows = rows_of(call, logits, chunk_targets, differentiated=False)
        return _add(sums, sums_of(rows, chunk_targets, logits.shape[2], call.options)), None

    return scan_chunks(call, step, _zeros(hidden), hidden, targets)[0]


def _forward(
    call: HeadCall, trainable: PyTree, frozen: PyTree, hidden: Array, targets: Array
) -> tuple[CrossEntropy, tuple[PyTree, Array]]:
    """The loss, and as residuals its gradients in trainable and hidden."""

    def step(
        carry: tuple[CrossEntropy, PyTree, Array], start: Array, piece: Array, chunk_targets: Array
    ) -> tuple[tuple[CrossEntropy, PyTree, Array], None]:
        sums, dtrainable, dhidden = carry
        logits, pull_back = jax.vjp(lambda trainable, piece: call.project(trainable, frozen, piece), trainable, piece)
        rows, dlogits = rows_of(call, logits, chunk_targets, differentiated=True)
        dtrainable_chunk, dpiece = pull_back(dlogits)
        dtrainable = jax.tree.map(lambda total, part: total + part.astype(jnp.float32), dtrainable, dtrainable_chunk)
        dhidden = lax.dynamic_update_slice_in_dim(dhidden, dpiece, start, axis=1)
        return (_add(sums, sums_of(rows, chunk_targets, logits.shape[2], call.options)), dtrainable, dhidden), None

    zeros = jax.tree.map(lambda leaf: lax.full_like(hidden, 0, jnp.float32, leaf.shape), trainable)
    carry = _zeros(hidden), zeros, zeros_in_chunks(call, hidden)
    (sums, dtrainable, dhidden), _ = scan_chunks(call, step, carry, hidden, targets)
    dtrainable = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), dtrainable, trainable)
    return sums, (dtrainable, dhidden[:, : hidden.shape[1]])


def _backward(
    call: HeadCall, residuals: tuple[PyTree, Array], cotangent: CrossEntropy
) -> tuple[PyTree, None, Array, None]:
    dtrainable, dhidden = jax.tree.map(
        lambda gradient: (cotangent.loss_sum * gradient.astype(jnp.float32)).astype(gradient.dtype), residuals
    )
    return dtrainable, None, dhidden, None


_cross_entropy.defvjp(_forward, _backward)


def _zeros(like: Array) -> CrossEntropy:
    """Zero sums that vary over the same devices as ``like`` (inside shard_map a scan's carry must say so)."""
    count, total = (lax.full_like(like, 0, dtype, ()) for dtype in (jnp.int32, jnp.float32))
    return CrossEntropy(total, count, count, total, total)


def _add(left: CrossEntropy, right: CrossEntropy) -> CrossEntropy:
    return CrossEntropy(*(a + b for a, b in zip(left, right, strict=True)))
