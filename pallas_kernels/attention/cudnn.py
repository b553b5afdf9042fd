"""Attention through cuDNN's FlashAttention kernels, as XLA calls them.

``jax.nn.dot_product_attention(implementation="cudnn")`` hides the softmax statistics in its own custom_vjp, where a
checkpoint policy that goes by name cannot save them, and rounds them to 16 bits when asked to return them. Here the
same primitives, forward and backward, are bound one by one. They are private to JAX; this file alone imports them.
JAX's own checks ask the default backend; ``why_not`` makes them for the target, so that the call can be traced for a
GPU that is not there.

Without documents the mask is cuDNN's causal one, with its sliding window where there is one: masked tiles are skipped.
Documents become an additive bias [B, 1, S, T] in q's dtype, any window in it: correct, but costly (no tile is skipped
for being in another document, and the bias is read by every head). The bias has no gradient.
"""

import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as fused

from pallas_kernels.attention.call import Call, Cotangents, Mask, Operands, Options
from pallas_kernels.attention.mask import queries_of, visible
from pallas_kernels.dispatch import Target

# Finite, because cuDNN subtracts two of them where a row is masked throughout; JAX's constants for the same purpose.
_MASKED = {jnp.dtype(jnp.bfloat16): -(2.0**41), jnp.dtype(jnp.float16): -(2.0**15)}


def why_not(target: Target, call: Call) -> str | None:
    """Why cuDNN cannot serve a call, in one clause, or None when it can."""
    if call.lse_gradient:
        return "its backward pass takes no gradient of the log-sum-exp, which return_lse=True asks for"
    q, k, v, options = call.q, call.k, call.v, call.options
    length, size, keys = q.shape[1], q.shape[3], k.shape[1]
    largest = 256 if target.lacks((9, 0)) is None else 128
    if size % 8 or size > largest:
        return f"the head size must be a multiple of 8 and at most {largest} on {target}, not {size}"
    if v.shape[3] != size:
        return f"it takes values of the keys' size {size}, not {v.shape[3]}"
    for name, wanted in (("soft cap", options.logits_soft_cap is not None), ("sinks", call.sinks)):
        if wanted:
            return f"XLA passes no {name} to cuDNN's attention"
    if options.dropout_rate > 0.0:
        return "its dropout has a generator of its own, which drops other weights"
    if options.causal and not (call.offset == 0 and length == keys):
        where = call.offset if isinstance(call.offset, str) else f"position {call.offset}"
        return f"its causal mask is for as many queries as keys, from position 0: not {length} over {keys}, at {where}"
    if options.sliding_window is not None and not options.causal:
        return "its sliding window is for causal attention"
    if call.documents and (length % 2 or keys % 2):
        return f"its backward pass with a mask needs even lengths, not {length} queries and {keys} keys"
    return None


def forward(operands: Operands, options: Options) -> tuple[Array, Array]:
    """The output and the log-sum-exp, for a call that ``why_not`` lets through; arguments as in `xla.forward`."""
    q, k, v, mask, sinks, seed = operands
    assert sinks is None and seed is None
    allowed = _allowed(q, k, mask, options)
    bias = _bias(q.dtype, allowed)
    out, lse = fused._dot_product_attention_fwd_p_wrapper.bind(
        *_operands(q, k, v, bias), **_parameters(bias, options), is_training=True
    )
    if allowed is not None:  # the bias of a query that sees nothing is the same for every key, and so masks nothing
        sees = jnp.any(allowed, axis=-1)
        out = jnp.where(sees[:, :, None, None], out, jnp.zeros((), q.dtype))
        lse = jnp.where(sees[:, None, :], lse, jnp.inf)
    return out, lse


def backward(operands: Operands, cotangents: Cotangents, options: Options) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v; arguments as in `xla.backward`."""
    q, k, v, mask, sinks, seed = operands
    lse, _, dout, out = cotangents
    assert sinks is None and seed is None
    bias = _bias(q.dtype, _allowed(q, k, mask, options))
    if bias is not None:  # with 0 for +inf the weights of a query that sees nothing are exp(bias) = 0, and finite
        lse = jnp.where(lse == jnp.inf, 0.0, lse)
    dq, dk, dv = fused._dot_product_attention_bwd_p_wrapper.bind(
        *_operands(q, k, v, bias), lse, out, dout, **_parameters(bias, options)
    )
    return dq, dk, dv


def _operands(q: Array, k: Array, v: Array, bias: Array | None) -> tuple[Array, ...]:
    """The primitives' operands; unused ones are empty arrays (lengths, offsets, page tables)."""
    unused = jnp.zeros((0,), q.dtype)
    return (q, k, v, unused if bias is None else bias) + (unused,) * 6


def _parameters(bias: Array | None, options: Options) -> dict[str, object]:
    return {
        "scale": options.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # a bias, and no gradient of it
        "mask_type": fused.MaskType.CAUSAL if options.causal else fused.MaskType.NO_MASK,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": options.sliding_window if bias is None else None,
    }


def _allowed(q: Array, k: Array, mask: Mask, options: Options) -> Array | None:
    """The mask [B, S, T]; None without documents, where cuDNN has its own."""
    if mask.ranges is None and mask.segment_ids is None:
        return None
    return visible(queries_of(mask, q.shape[1]), mask, k.shape[1], options)


def _bias(dtype: jnp.dtype, allowed: Array | None) -> Array | None:
    """0 where the query sees the key, a large negative number elsewhere: [B, 1, S, T]."""
    return None if allowed is None else jnp.where(allowed, 0.0, _MASKED[dtype]).astype(dtype)[:, None]
