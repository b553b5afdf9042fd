"""Scaled dot-product attention: the public function.

Grouped-query heads, causality, packed documents, padding, a sliding window, capped logits, sinks, dropout and a
key-value cache in one function, differentiable once for all implementations, which forward and backward pass choose
independently:

- ``mosaic``: Hopper, bfloat16 and float16, every feature.
- ``cudnn``: NVIDIA GPUs of compute capability 8.0 or more, bfloat16 and float16, training and prefill, without cap,
  sinks and dropout.
- ``triton``: the same GPUs and dtypes, every feature.
- ``xla``: everything else; float32, CPU, older cards, documents known only at run time (decoding from a cache).

`config.preference` has the order.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array as JaxArray
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pallas_kernels.attention import checks, config, cudnn, mosaic_sm90, ranges, triton, xla
from pallas_kernels.attention.call import Call, Cotangents, Mask, Operands, Options
from pallas_kernels.attention.ranges import SegmentRanges
from pallas_kernels.dispatch import HALF, Implementation, Registry, Target
from pallas_kernels.transformations import custom_vjp, number


def attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_segment_ids: Int[Array, "B T"] | None = None,
    segment_ranges: SegmentRanges | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    query_offset: int | Int[Array, "#B"] | Int[Array, ""] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    dropout_row: int | Int[Array, ""] = 0,
    return_lse: bool = False,
    implementation: str | tuple[str | None, str | None] | None = None,
) -> Any:
    """softmax(scale · q kᵀ) v over the keys that each query may see.

    Query head h uses key head h // (H / K). Logits, softmax and sums are float32 for any input dtype; float32 inputs
    are multiplied in float32. A query that sees no key gives zeros and passes no gradient back. The backward pass
    keeps, besides its inputs, the output and one float32 number a query and head, under the names ``SAVEABLE_NAMES``
    for checkpoint policies.

    Args:
        q: queries in bfloat16, float16 or float32.
        k: keys, of q's dtype; K divides H.
        v: values, of q's dtype; their size may differ from that of q and k.
        segment_ids: the document of each query, counted from 1, int32; 0 marks padding, which sees nothing and is not
            seen. None where the row is one document. Ids known only at run time may belong to documents in several
            pieces, which only some implementations take.
        kv_segment_ids: the document of each key; segment_ids by default, where there are as many keys.
        segment_ranges: instead of ids, `segment_ranges(segment_ids)`: documents that each are one piece of the row.
            Made once a batch for all layers, they let kernels skip other documents.
        causal: key t is visible to query s only if t <= s + query_offset.
        sliding_window: key t is visible to query s only if t > s + query_offset - sliding_window, and, where causal is
            False, t < s + query_offset + sliding_window.
        logits_soft_cap: the scaled logits become cap · tanh(logits / cap).
        sinks: float32, a logit for each query head that joins the softmax's denominator and has no value.
        query_offset: the position of the first query among the keys: a number for all rows or one for each. By default
            the last query stands at the last key, T - S.
        scale: factor of the logits, 1/√D by default.
        dropout_rate: probability with which each weight is dropped after the softmax; the others are divided by
            1 - dropout_rate.
        dropout_key: random key; it drops the same weights in every implementation.
        dropout_row: number of the first row. Rows are counted from 0 on each device: inside shard_map, with the rows
            before a device's own here, the devices drop the same weights as one device alone.
        return_lse: whether to return the log-sum-exp of each query's logits as well.
        implementation: "mosaic", "cudnn", "triton" or "xla" for both passes, or a pair for the forward and the backward
            pass; None: the fastest on the target that serves the call.

    Returns:
        The weighted values [B, S, H, Dv] in q's dtype; with return_lse a pair of them and the natural log-sum-exp of
        the scaled, capped, visible logits and the sink, float32 [B, H, S], -inf for a query that sees neither.
        Differentiable in q, k, v and sinks.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    checks.arrays(q, k, v, sinks)
    checks.documents(q, k, segment_ids, kv_segment_ids, segment_ranges)
    place, offset = _offset(q, k, query_offset)
    options = Options(
        q.shape[3] ** -0.5 if scale is None else number("attention", "scale", scale),
        causal,
        sliding_window,
        None if logits_soft_cap is None else number("attention", "logits_soft_cap", logits_soft_cap),
        dropout_rate := number("attention", "dropout_rate", dropout_rate),
        place if isinstance(place, int) else None,
    )
    checks.options(options, dropout_key)
    if segment_ids is not None and kv_segment_ids is None:
        kv_segment_ids = segment_ids

    forward, backward = choose_pair(
        config.forced() if implementation is None else implementation,
        Call(
            *(q, k, v),
            options,
            documents=segment_ids is not None or segment_ranges is not None,
            disorder=_disorder(segment_ids, kv_segment_ids),
            offset=place,
            sinks=sinks is not None,
        ),
        lse_gradient=return_lse,
    )
    if segment_ids is not None and not NEEDS_RANGES.isdisjoint((forward, backward)):
        segment_ranges = ranges.segment_ranges(segment_ids, kv_segment_ids)
    mask = Mask(segment_ranges, segment_ids, kv_segment_ids, offset)
    seed = None
    if dropout_key is not None and dropout_rate > 0.0:
        heads_before = jnp.asarray(dropout_row).astype(jnp.uint32) * jnp.uint32(q.shape[2])
        seed = jax.random.bits(dropout_key, (2,), jnp.uint32).at[0].add(heads_before)
    results: tuple[JaxArray, JaxArray] = _attend(q, k, v, mask, sinks, seed, options, forward, backward)
    out, lse = results
    return (out, jnp.where(lse == jnp.inf, -jnp.inf, lse)) if return_lse else out


NEEDS_RANGES: frozenset[str] = frozenset({"mosaic", "triton"})
"""Implementations that read documents as ranges alone."""


def on_ranges(module: Any, **needs: Any) -> Implementation:
    """The implementation of a module that reads documents as ranges: their ids must be such that ranges can be made."""

    def why_not(device: Target, call: Call, **facts) -> str | None:
        return call.disorder or module.why_not(device, call)

    return Implementation(module.forward, module.backward, why_not=why_not, **needs)


#: A new implementation is a line here and its place in `config.preference`. Each is a module with
#:
#:     why_not(device, call) -> one clause, or None where it serves
#:     forward(operands, options) -> (out [B, S, H, Dv] in q's dtype, lse [B, H, S] float32)
#:     backward(operands, cotangents, options) -> (dq, dk, dv)
#:
#: - ``lse`` is the natural log-sum-exp of the scaled, capped, visible logits and the sink, +inf for a query that sees
#:   neither key nor sink; so exp(logit − lse) is its weight, and zero there.
#: - ``seed`` is uint32[2] where options.dropout_rate > 0, else None; `dropout.random_bits` says what is kept.
REGISTRY = Registry(
    "attention",
    {
        "mosaic": on_ranges(mosaic_sm90, capability=(9, 0), exactly=True, dtypes=HALF),
        "cudnn": Implementation(
            cudnn.forward,
            cudnn.backward,
            capability=(8, 0),
            dtypes=HALF,
            why_not=lambda device, call, **facts: cudnn.why_not(device, call),
        ),
        "triton": on_ranges(triton, capability=(8, 0), dtypes=HALF),
        "xla": Implementation(xla.forward, xla.backward),
    },
    lambda device, **facts: config.preference(device),
)


def choose_pair(
    implementation: str | Sequence[str | None] | None, call: Call, *, lse_gradient: bool = False
) -> tuple[str, str]:
    """The names of the implementations of the forward and of the backward pass.

    Args:
        implementation: as `attention` takes it.
        call: to be served.
        lse_gradient: whether the log-sum-exp has a gradient.
    """
    if implementation is None or isinstance(implementation, str):
        pair = (implementation, implementation)
    else:
        pair = implementation
    if len(pair) != 2:
        raise ValueError(
            "attention: implementation: expected a name or a pair of names, for the forward and the backward pass, "
            f"got {implementation!r}"
        )
    differ, dtype = pair[0] != pair[1], call.q.dtype
    forward = REGISTRY.choose(pair[0], direction="forward" if differ else "", call=call, dtype=dtype)
    call = call._replace(lse_gradient=lse_gradient)
    return forward, REGISTRY.choose(pair[1], direction="backward" if differ else "", call=call, dtype=dtype)


@custom_vjp(nondiff_argnums=(6, 7, 8))
def _attend(q, k, v, mask, sinks, seed, options: Options, forward: str, backward: str) -> tuple[JaxArray, JaxArray]:
    return REGISTRY[forward].forward(Operands(q, k, v, mask, sinks, seed), options)


def _attend_forward(q, k, v, mask, sinks, seed, options, forward, backward):
    results = REGISTRY[forward].forward(Operands(q, k, v, mask, sinks, seed), options)
    # Behind a barrier: a kernel whose result goes into a scan's stack of residuals and on to the next operation would
    # run twice on a GPU, once in XLA's fusion with the update of the stack.
    results = lax.optimization_barrier(tuple(results))
    out, lse = (checkpoint_name(*pair) for pair in zip(results, config.SAVEABLE_NAMES, strict=True))
    return (out, lse), (q, k, v, mask, sinks, seed, out, lse)


def _attend_backward(options, forward, backward, residuals, gradients):
    q, k, v, mask, sinks, seed, out, lse = residuals
    dout, dlse = gradients
    products = dout.astype(jnp.float32) * out.astype(jnp.float32)
    delta = jnp.sum(products, axis=-1).transpose(0, 2, 1) - dlse
    operands, cotangents = Operands(q, k, v, mask, sinks, seed), Cotangents(lse, delta, dout, out)
    dq, dk, dv = REGISTRY[backward].backward(operands, cotangents, options)
    dsinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse)
        dsinks = -jnp.sum(weights * delta, axis=(0, 2)).astype(sinks.dtype)
    return dq, dk, dv, None, dsinks, None


_attend.defvjp(_attend_forward, _attend_backward)


def _disorder(*segment_ids: JaxArray | None) -> str | None:
    """Why no ranges can be made of documents' ids; None where they can or there are no ids."""
    for ids in segment_ids:
        if isinstance(ids, Tracer):
            return (
                "documents that are known only at run time may not be contiguous: pass segment_ranges(segment_ids) "
                "for those that are"
            )
        reason = None if ids is None else ranges.not_contiguous(ids)
        if reason is not None:
            return reason
    return None


def _offset(q: JaxArray, k: JaxArray, query_offset) -> tuple[int | str, JaxArray]:
    """The first query's position: as a number or the clause that says why there is none, and as an array."""
    if query_offset is None:
        query_offset = k.shape[1] - q.shape[1]
    offset = jnp.asarray(query_offset, jnp.int32).reshape(-1)
    if offset.size not in (1, q.shape[0]):
        raise ValueError(f"attention: query_offset must be one number or one a row ({q.shape[0]}), got {offset.size}")
    if isinstance(query_offset, Tracer) or np.size(query_offset) != 1:
        return "positions known only at run time", offset
    return int(np.asarray(query_offset).reshape(())), offset
