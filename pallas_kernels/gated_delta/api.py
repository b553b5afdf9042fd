"""The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464): the public function.

The implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, bfloat16 and float16, heads of 64 or 128;
- ``xla``: everything else.
"""

import jax.numpy as jnp
from jax import Array as JaxArray
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.config import SAVEABLE_NAMES
from pallas_kernels.dispatch import HALF, Implementation, triton_or_xla
from pallas_kernels.gated_delta import triton, triton_backward, xla
from pallas_kernels.gated_delta.calls import check, why_not_triton
from pallas_kernels.gated_delta.chunks import CHUNK, Chunks, chunks_of, padded, wide
from pallas_kernels.transformations import custom_vjp, known, number, with_automatic_axes


def gated_delta(
    q: Float[Array, "B S K D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S H Dv"],
    decay: Float[Array, "B S H"],
    beta: Float[Array, "B S H"],
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    state: Float[Array, "B H D Dv"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B S H Dv"], Float[Array, "B H D Dv"]]:
    """Linear attention whose state forgets by a gate and is corrected by every token.

    With S = 0 before a document's first token, of each value head: S ← exp(decay) · S, then S ← S + k uᵀ where
    u = beta · (v - Sᵀk), and the output is scale · Sᵀq. Value head h has the queries and keys of head h / (H / K).
    States and sums are float32; products over tokens are of v's dtype. One token a row: `gated_delta_token`.

    Args:
        q: queries; unit vectors, where the model has them so.
        k: keys, the same.
        v: values, whose dtype is that of q and k.
        decay: float32, logarithms of the factors by which the state is kept, at most 0.
        beta: float32, how much of the correction is written; from 0 to 1, or to 2.
        scale: factor of the output.
        segment_ids: int32, the documents of each row, each in one piece; None: a row is one.
        state: float32, of the tokens before the row's first, which belong to its document; None: there are none.
        implementation: None, "triton" or "xla".

    Returns:
        The output in v's dtype, and the float32 state after the last token. Differentiable in all but segment_ids;
        beside the operands the backward pass keeps [B, S, H, 64] in v's dtype, named for `jax.checkpoint`'s policies,
        as is the output, as attention's are.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    check((q, k, v, decay, beta), segment_ids, state)
    scale = number("gated_delta", "scale", scale)
    precise, (batch, length, heads, value_size), size = wide(v.dtype), v.shape, k.shape[3]
    state = jnp.zeros((batch, heads, size, value_size), precise) if state is None else state.astype(precise)
    states = known(batch, 1) * heads * size * value_size * -(-length // CHUNK)
    chosen = REGISTRY.choose(implementation, dtype=v.dtype, sizes=(size, value_size), states=states)
    operands = padded((q, k, v, decay.astype(precise), beta.astype(precise)))
    out, after = with_automatic_axes(
        lambda *given: _by_chunks(*given, scale, chosen),
        *(*operands, state, segment_ids),
        rows_like=(v, v),
    )
    return out[:, :length], after


#: forward(q, k, v, chunks, state, scale) -> (output, state after the last token, `inner` of the chunks)
#: backward(q, k, v, chunks, state, inner, gradient of the output, of the state after, scale)
#: -> gradients of (q, k, v, decay [B, H, S], beta [B, H, S], state)
REGISTRY = triton_or_xla(
    "gated_delta",
    Implementation(triton.forward, triton_backward.backward, dtypes=HALF, why_not=why_not_triton),
    Implementation(xla.forward, xla.backward),
)


@custom_vjp(nondiff_argnums=(7, 8))
def _by_chunks(q, k, v, decay, beta, state, segment_ids, scale: float, chosen: str) -> tuple[JaxArray, JaxArray]:
    return REGISTRY[chosen].forward(q, k, v, chunks_of(decay, beta, segment_ids), state, scale)[:2]


def _forward(q, k, v, decay, beta, state, segment_ids, scale: float, chosen: str):
    chunks: Chunks = chunks_of(decay, beta, segment_ids)
    out, after, inner = REGISTRY[chosen].forward(q, k, v, chunks, state, scale)
    out, inner = (checkpoint_name(*pair) for pair in zip((out, inner), SAVEABLE_NAMES, strict=True))
    return (out, after), (q, k, v, decay, beta, state, segment_ids, inner)


def _backward(scale: float, chosen: str, residuals, gradients):
    q, k, v, decay, beta, state, segment_ids, inner = residuals
    chunks = chunks_of(decay, beta, segment_ids)
    dq, dk, dv, ddecay, dbeta, dstate = REGISTRY[chosen].backward(q, k, v, chunks, state, inner, *gradients, scale)
    return dq, dk, dv, jnp.moveaxis(ddecay, 1, 2), jnp.moveaxis(dbeta, 1, 2), dstate, None


_by_chunks.defvjp(_forward, _backward)
