"""A call of attention: its static options, its arrays forward and backward, and what implementations judge it by."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, Int32, UInt32

from pallas_kernels.attention.ranges import SegmentRanges


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a call.

    Attributes:
        scale: factor of the logits.
        causal: key t is visible to query s only if t <= s + query_offset.
        sliding_window: a query sees the keys t > s + query_offset − sliding_window only, that is with ``causal`` its
            own and the sliding_window − 1 before it; without ``causal`` also only t < s + query_offset +
            sliding_window, as many behind it as before. None: no window.
        logits_soft_cap: logits become cap · tanh(logits / cap); None: no cap.
        dropout_rate: probability that a weight is dropped; 0: no dropout.
        query_offset: the position of every row's first query among the keys where it is known; None: in the mask.
    """

    scale: float
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    query_offset: int | None = None


class Mask(NamedTuple):
    """The mask's arrays, beside the static options.

    Attributes:
        ranges: where the documents lie; None where every row is one document, or where only their ids are known.
        segment_ids: the document of each query, from 1; 0 is padding, which sees nothing and is not seen. None where
            every row is one document, or where only the ranges are known.
        kv_segment_ids: the document of each key; None exactly where segment_ids is.
        query_offset: the position of each row's first query among the keys, or one for all rows.
    """

    ranges: SegmentRanges | None
    segment_ids: Int[Array, "B S"] | None
    kv_segment_ids: Int[Array, "B T"] | None
    query_offset: Int32[Array, "#B"]


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        mask: what each query sees; documents as ranges for implementations in `api.NEEDS_RANGES`.
        sinks: a logit for each query head that joins the denominator alone, or None.
        seed: two numbers where there is dropout.
    """

    q: Float[Array, "B S H D"]
    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K Dv"]
    mask: Mask
    sinks: Float[Array, " H"] | None
    seed: UInt32[Array, "2"] | None


class Cotangents(NamedTuple):
    """Inputs of the backward pass beside the operands, whose sinks are already in the log-sum-exp.

    Attributes:
        lse: the log-sum-exp of each query's logits, float32; +inf for a query that sees nothing.
        delta: rowsum(dout ∘ out) − dlse, float32.
        dout: the output's gradient.
        out: the output, from which cuDNN computes delta; the others do not read it.
    """

    lse: Float[Array, "B H S"]
    delta: Float[Array, "B H S"]
    dout: Float[Array, "B S H Dv"]
    out: Float[Array, "B S H Dv"]


class Call(NamedTuple):
    """A call of attention as implementations judge it.

    Attributes:
        q: queries [B, S, H, D].
        k: keys [B, T, K, D].
        v: values [B, T, K, Dv].
        options: the static part.
        documents: whether there are documents.
        disorder: why no ranges can be made of the documents' ids; None where they can or there are no ids.
        offset: the position of the first query among the keys or, where that is known only at run time, a clause that
            says so.
        sinks: whether there are sinks.
        lse_gradient: for a backward pass: whether the log-sum-exp has a gradient.
    """

    q: Array
    k: Array
    v: Array
    options: Options
    documents: bool = False
    disorder: str | None = None
    offset: int | str = 0
    sinks: bool = False
    lse_gradient: bool = False
