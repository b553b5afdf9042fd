"""Attention through cuDNN's FlashAttention kernels, as XLA calls them.

``jax.nn.dot_product_attention(implementation="cudnn")`` hides the softmax statistics in its own custom_vjp, where a
checkpoint policy that goes by name cannot save them, and rounds them to 16 bits when asked to return them. Here the
same two primitives, forward and backward, are bound in a custom_vjp that names what it keeps (``SAVEABLE_NAMES``).
They are private to JAX and the same in 0.10.2 and 0.11; this file is the only one that imports them. JAX's own checks
ask the default backend; ``unsupported`` makes them for the target, so that the call can be traced for a GPU that is
not there.

Without segments the mask is cuDNN's causal one, which skips what is masked. Segments become an additive bias
[B, 1, S, T] in q's dtype: correct, but costly (no tile is skipped for being in another document, and the bias is read
by every head). The bias has no gradient.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.config import SAVEABLE_NAMES
from pallas_kernels.attention.mask import same_document
from pallas_kernels.dispatch import Target

# Finite, because cuDNN subtracts two of them where a row is masked throughout; JAX's constants for the same purpose.
_MASKED = {jnp.dtype(jnp.bfloat16): -(2.0**41), jnp.dtype(jnp.float16): -(2.0**15)}


def unsupported(
    target: Target, q: Array, k: Array, *, segments: bool, causal: bool, query_offset: int | Array
) -> str | None:
    """Why cuDNN cannot serve a call on the target, or None when it can.

    Args:
        target: the device to plan for.
        q: queries [B, S, H, D].
        k: keys [B, T, K, D].
        segments: whether segment ids were given.
        causal: whether a query sees only keys up to its own position.
        query_offset: the position of the first query among the keys.

    Returns:
        One clause, or None.
    """
    capability = target.compute_capability
    length, size, keys = q.shape[1], q.shape[3], k.shape[1]
    if target.platform != "cuda" or capability is None or capability < (8, 0):
        return f"cuDNN's attention needs an NVIDIA GPU of compute capability 8.0 or more, not {target}"
    if q.dtype not in _MASKED:
        return f"cuDNN's attention takes bfloat16 or float16, not {q.dtype}"
    largest = 256 if capability >= (9, 0) else 128
    if size % 8 or size > largest:
        return f"the head size must be a multiple of 8 and at most {largest} on {target}, not {size}"
    if causal and not (isinstance(query_offset, int) and query_offset == 0 and length == keys):
        where = (
            f"at position {query_offset}" if isinstance(query_offset, int) else "at positions known only at run time"
        )
        return f"its causal mask is for as many queries as keys, from position 0: not {length} over {keys}, {where}"
    if segments and (length % 2 or keys % 2):
        return f"its backward pass with a mask needs even lengths, not {length} queries and {keys} keys"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    causal: bool,
    scale: float,
) -> Array:
    """``api.attention`` for a call that ``unsupported`` lets through."""
    bias = _bias(q.dtype, segment_ids, kv_segment_ids)
    (out,) = fused._dot_product_attention_fwd_p_wrapper.bind(
        *_operands(q, k, v, bias), **_parameters(bias, causal, scale), is_training=False
    )
    return _without_padding(out, segment_ids)


def _forward(q, k, v, segment_ids, kv_segment_ids, causal, scale):
    bias = _bias(q.dtype, segment_ids, kv_segment_ids)
    out, lse = fused._dot_product_attention_fwd_p_wrapper.bind(
        *_operands(q, k, v, bias), **_parameters(bias, causal, scale), is_training=True
    )
    out = checkpoint_name(_without_padding(out, segment_ids), SAVEABLE_NAMES[0])
    lse = checkpoint_name(lse, SAVEABLE_NAMES[1])
    return out, (q, k, v, segment_ids, kv_segment_ids, out, lse)


def _backward(causal, scale, residuals, dout):
    q, k, v, segment_ids, kv_segment_ids, out, lse = residuals
    bias = _bias(q.dtype, segment_ids, kv_segment_ids)
    dq, dk, dv = fused._dot_product_attention_bwd_p_wrapper.bind(
        *_operands(q, k, v, bias), lse, out, _without_padding(dout, segment_ids), **_parameters(bias, causal, scale)
    )
    return dq, dk, dv, None, None


attention.defvjp(_forward, _backward)


def _operands(q: Array, k: Array, v: Array, bias: Array | None) -> tuple[Array, ...]:
    """The primitives' operands; what is not used is an empty array (lengths, offsets, page tables)."""
    unused = jnp.zeros((0,), q.dtype)
    return (q, k, v, unused if bias is None else bias) + (unused,) * 6


def _parameters(bias: Array | None, causal: bool, scale: float) -> dict[str, object]:
    return {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # a bias, and no gradient of it
        "mask_type": fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }


def _bias(dtype: jnp.dtype, segment_ids: Array | None, kv_segment_ids: Array | None) -> Array | None:
    """0 where query and key are of one document, a large negative number elsewhere: [B, 1, S, T]."""
    if segment_ids is None or kv_segment_ids is None:
        return None
    return jnp.where(same_document(segment_ids, kv_segment_ids), 0.0, _MASKED[dtype]).astype(dtype)[:, None]


def _without_padding(rows: Array, segment_ids: Array | None) -> Array:
    """Zero rows [B, S, H, D] for padding queries, whose bias is the same for every key and so masks nothing."""
    if segment_ids is None:
        return rows
    return jnp.where((segment_ids != 0)[:, :, None, None], rows, 0.0)
