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

The pieces are cut along the sequence, so the batch axis keeps its sharding. References: Liger Kernel (arXiv
2410.10989), Cut Cross-Entropy (arXiv 2411.09009).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels import dispatch
from pallas_kernels.cross_entropy.implementations import REGISTRY, Case
from pallas_kernels.cross_entropy.reference import IGNORE_INDEX, CrossEntropy
from pallas_kernels.cross_entropy.rows import Options, sums_of

Project = Callable[[Any, Any, Float[Array, "B C E"]], Float[Array, "B C V"]]


class _Call(NamedTuple):
    """The static part of a call; the arguments of `chunked_cross_entropy`."""

    project: Project
    chunk_size: int
    options: Options
    implementation: str | None


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
    if hidden.ndim != 3 or targets.shape != hidden.shape[:2] or not hidden.shape[1]:
        raise ValueError(
            "chunked_cross_entropy: hidden must be [batch, length, width] with length >= 1 and targets "
            f"[batch, length], got {hidden.shape} and {targets.shape}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunked_cross_entropy: chunk_size must be at least 1, got {chunk_size}")
    if not 0 <= label_smoothing < 1 or not z_loss >= 0:
        raise ValueError(
            "chunked_cross_entropy: label_smoothing must be in [0, 1) and z_loss at least 0, got "
            f"{label_smoothing} and {z_loss}"
        )
    if not logits_scale > 0 or (logits_soft_cap is not None and not logits_soft_cap > 0):
        raise ValueError(
            "chunked_cross_entropy: logits_scale and logits_soft_cap must be greater than 0, got "
            f"{logits_scale} and {logits_soft_cap}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainable):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                "chunked_cross_entropy: trainable leaves must be floating-point, got "
                f"{leaf.dtype} at {jax.tree_util.keystr(path) or 'the root'}; pass it in frozen"
            )
    options = Options(label_smoothing, z_loss, logits_scale, logits_soft_cap)
    call = _Call(project, min(chunk_size, hidden.shape[1]), options, implementation)
    return _cross_entropy(call, trainable, frozen, hidden, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(call: _Call, trainable: PyTree, frozen: PyTree, hidden: Array, targets: Array) -> CrossEntropy:
    """The loss alone, without differentiation."""
    padded_hidden, padded_targets = _pad(hidden, targets, call.chunk_size)

    def step(sums: CrossEntropy, start: Array) -> tuple[CrossEntropy, None]:
        logits = call.project(trainable, frozen, _slice(padded_hidden, start, call.chunk_size))
        chunk_targets = _slice(padded_targets, start, call.chunk_size)
        rows = _rows(call, logits, chunk_targets, differentiated=False)
        return _add(sums, sums_of(rows, chunk_targets, logits.shape[2], call.options)), None

    sums, _ = lax.scan(step, _zeros(hidden), _starts(padded_hidden, call.chunk_size))
    return sums


def _forward(
    call: _Call, trainable: PyTree, frozen: PyTree, hidden: Array, targets: Array
) -> tuple[CrossEntropy, tuple[PyTree, Array]]:
    """The loss, and as residuals its gradients in trainable and hidden."""
    padded_hidden, padded_targets = _pad(hidden, targets, call.chunk_size)

    def step(
        carry: tuple[CrossEntropy, PyTree, Array], start: Array
    ) -> tuple[tuple[CrossEntropy, PyTree, Array], None]:
        sums, dtrainable, dhidden = carry
        piece = _slice(padded_hidden, start, call.chunk_size)
        logits, pull_back = jax.vjp(lambda trainable, piece: call.project(trainable, frozen, piece), trainable, piece)
        chunk_targets = _slice(padded_targets, start, call.chunk_size)
        rows, dlogits = _rows(call, logits, chunk_targets, differentiated=True)
        dtrainable_chunk, dpiece = pull_back(dlogits)
        dtrainable = jax.tree.map(lambda total, part: total + part.astype(jnp.float32), dtrainable, dtrainable_chunk)
        dhidden = lax.dynamic_update_slice_in_dim(dhidden, dpiece, start, axis=1)
        return (_add(sums, sums_of(rows, chunk_targets, logits.shape[2], call.options)), dtrainable, dhidden), None

    zeros = jax.tree.map(lambda leaf: lax.full_like(hidden, 0, jnp.float32, leaf.shape), trainable)
    carry = (_zeros(hidden), zeros, jnp.zeros_like(padded_hidden))
    (sums, dtrainable, dhidden), _ = lax.scan(step, carry, _starts(padded_hidden, call.chunk_size))
    dtrainable = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), dtrainable, trainable)
    return sums, (dtrainable, dhidden[:, : hidden.shape[1]])


def _backward(
    call: _Call, residuals: tuple[PyTree, Array], cotangent: CrossEntropy
) -> tuple[PyTree, None, Array, None]:
    dtrainable, dhidden = jax.tree.map(
        lambda gradient: (cotangent.loss_sum * gradient.astype(jnp.float32)).astype(gradient.dtype), residuals
    )
    return dtrainable, None, dhidden, None


_cross_entropy.defvjp(_forward, _backward)


def _rows(call: _Call, logits: Float[Array, "B C V"], targets: Int[Array, "B C"], *, differentiated: bool) -> Any:
    """`Rows` of a chunk's logits, and where it is differentiated their gradient behind them."""
    chosen = REGISTRY.choose(Case(dispatch.target(), logits.shape, logits.dtype), call.implementation)
    operation = REGISTRY[chosen].backward if differentiated else REGISTRY[chosen].forward
    return operation(logits, targets, options=call.options)


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
    count, total = (lax.full_like(like, 0, dtype, ()) for dtype in (jnp.int32, jnp.float32))
    return CrossEntropy(total, count, count, total, total)


def _add(left: CrossEntropy, right: CrossEntropy) -> CrossEntropy:
    return CrossEntropy(*(a + b for a, b in zip(left, right, strict=True)))
