"""cuDNN's variable-length attention: every document of a packed batch is a sequence of its own, of its own length.

cuDNN reads a list of at most B · M documents, M for each row: their lengths, and their starts, counted in elements
from the start of the array. It visits each as one member of a batch, so other documents cost nothing, but it
keeps the statistics of each for S tokens: [B · M, H, S] float32. That is why M must be known while tracing
(`segment_ranges(…, max_documents=…)`) and should be no larger than it need be. The residual of the backward pass is
[B, H, S], as everywhere; the larger array lives while cuDNN runs.

JAX's wrapper makes that list of per-row lists, in JAX 0.10 with key offsets that are wrong for grouped heads (it counts
them by the queries' heads). So the list is made here, for the primitive beneath the wrapper, which passes it to
cuDNN as it is. That primitive has no rule for splitting a batch: over several devices it belongs into shard_map.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.attention.options import Options
from pallas_kernels.attention.ranges import SegmentRanges
from pallas_kernels.dispatch import Target


def why_not(target: Target, q: Array, k: Array, ranges: SegmentRanges, options: Options) -> str | None:
    """Why a call that cuDNN serves with a bias cannot take the variable-length path, or None when it can.

    Args:
        target: the device to plan for.
        q: queries [B, S, H, D].
        k: keys [B, T, K, D].
        ranges: of the call.
        options: of the call.
    """
    if ranges.documents is None:
        return "it needs the list of documents: pass segment_ranges(segment_ids, max_documents=…)"
    if target.compute_capability is None or target.compute_capability < (9, 0):
        return f"it needs compute capability 9.0 or more, the target is {target}"
    if q.shape[1] != k.shape[1]:
        return f"its documents are as long in queries as in keys, there are {q.shape[1]} and {k.shape[1]}"
    if options.sliding_window is not None:
        return "it has no sliding window"
    if q.size >= 2**31:
        return f"it counts elements in 32 bits, the queries have {q.size}"
    return None


def forward(q: Array, k: Array, v: Array, ranges: SegmentRanges, options: Options) -> tuple[Array, Array]:
    """The output and the log-sum-exp, NaN for documents beyond the list; arguments as in `xla.forward`."""
    documents = listed(ranges)
    out, statistics = fused._dot_product_attention_fwd_p.bind(
        *_operands(q, k, v, documents), **_parameters(options), is_training=True
    )
    # cuDNN leaves the memory of tokens that are in no listed document as it finds it
    elsewhere = jnp.where(ranges.k_start < ranges.k_end, jnp.float32(jnp.nan), jnp.float32(0.0))
    out = jnp.where(documents.inside[:, :, None, None], out, elsewhere.astype(q.dtype)[:, :, None, None])
    heads = jnp.arange(q.shape[2], dtype=jnp.int32)[None, :, None]
    lse = statistics[documents.slot[:, None, :], heads, documents.place[:, None, :]]
    return out, jnp.where(documents.inside[:, None, :], lse, (elsewhere + jnp.inf)[:, None, :])


def backward(
    q: Array, k: Array, v: Array, ranges: SegmentRanges, lse: Array, out: Array, dout: Array, options: Options
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v; arguments as in `cudnn.backward`."""
    documents = listed(ranges)
    gradients = fused._dot_product_attention_bwd_p.bind(
        *_operands(q, k, v, documents), statistics_of(documents, lse), out, dout, **_parameters(options)
    )
    inside = documents.inside[:, :, None, None]
    dq, dk, dv = (jnp.where(inside, gradient, jnp.zeros((), gradient.dtype)) for gradient in gradients)
    return dq, dk, dv


class Listed(NamedTuple):
    """The batch's documents in one list, those that exist first, as cuDNN takes them.

    Attributes:
        row: the row of each document in the list; B behind the last.
        start: its first token in its row; 0 behind the last.
        length: its tokens; 0 behind the last.
        inside: whether each token is of a document in the list.
        slot: where in the list its document is; 0 for a token of none.
        place: each token's place in its document; 0 for a token of none.
    """

    row: Int32[Array, " B*M"]
    start: Int32[Array, " B*M"]
    length: Int32[Array, " B*M"]
    inside: Bool[Array, "B S"]
    slot: Int32[Array, "B S"]
    place: Int32[Array, "B S"]


def listed(ranges: SegmentRanges) -> Listed:
    """The list of the documents that `segment_ranges` found.

    Args:
        ranges: made with max_documents.
    """
    documents = ranges.documents
    assert documents is not None
    rows, most = documents.start.shape
    exists = documents.length > 0
    counts = jnp.sum(exists, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    (found,) = jnp.nonzero(exists.reshape(-1), size=rows * most, fill_value=rows * most)
    start, length = (
        jnp.take(leaf.reshape(-1), found, mode="fill", fill_value=0) for leaf in (documents.start, documents.length)
    )
    inside = documents.number < most
    number = jnp.where(inside, documents.number, 0)
    token = jnp.arange(number.shape[1], dtype=jnp.int32)[None, :]
    place = token - jnp.take_along_axis(documents.start, number, axis=1)
    return Listed(
        found.astype(jnp.int32) // most,
        start,
        length,
        inside,
        jnp.where(inside, before[:, None] + number, 0),
        jnp.where(inside, place, 0),
    )


def statistics_of(documents: Listed, lse: Float32[Array, "B H S"]) -> Float32[Array, "B*M H S"]:
    """The log-sum-exp of the rows as that of the documents, each from its first token on; +inf behind its last.

    Args:
        documents: of the batch.
        lse: of the rows.
    """
    rows, heads, tokens = lse.shape
    place = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    token = jnp.minimum(documents.start[:, None] + place, tokens - 1)
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    moved = lse[jnp.minimum(documents.row, rows - 1)[:, None, None], head, token[:, None, :]]
    return jnp.where((place < documents.length[:, None])[:, None, :], moved, jnp.inf)


def offsets(documents: Listed, heads: int, size: int) -> Int32[Array, "B M+1"]:
    """Where each document starts, in elements; for those behind the last, and once more at the end, where all end.

    Args:
        documents: of the batch.
        heads: of the array; K for keys and values.
        size: D.
    """
    rows, tokens = documents.inside.shape
    start = jnp.where(documents.row < rows, documents.row * tokens + documents.start, rows * tokens)
    start = jnp.pad(start, (0, rows), constant_values=rows * tokens)
    return (start * (heads * size)).reshape(rows, -1)


def _operands(q: Array, k: Array, v: Array, documents: Listed) -> tuple[Array, ...]:
    """The primitives' operands; unused ones are empty arrays (the bias, page tables)."""
    unused = jnp.zeros((0,), q.dtype)
    lengths = documents.length.reshape(q.shape[0], -1)
    starts = (offsets(documents, *array.shape[2:]) for array in (q, k))
    return (q, k, v, unused, lengths, lengths, *starts, unused, unused)


def _parameters(options: Options) -> dict[str, object]:
    return {
        "scale": options.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": fused.MaskType.PADDING_CAUSAL if options.causal else fused.MaskType.PADDING,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
