"""The gated delta rule (arXiv 2412.06464) for one token a row after others, as decoding has it.

Both products with the state are of S before the token, so that one pass reads and writes it: with γ S + k uᵀ after it
the output is γ Sᵀq + u (k·q).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import HALF, Implementation, triton_or_xla
from pallas_kernels.gated_delta.calls import check, why_not_triton
from pallas_kernels.gated_delta.chunks import wide
from pallas_kernels.transformations import number

#: Columns of a state that a program has.
_COLUMNS = 32


def gated_delta_token(
    q: Float[Array, "B 1 K D"],
    k: Float[Array, "B 1 K D"],
    v: Float[Array, "B 1 H Dv"],
    decay: Float[Array, "B 1 H"],
    beta: Float[Array, "B 1 H"],
    states: Float[Array, "L B H D Dv"],
    layer: Int[Array, ""] | int,
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 H Dv"], Float[Array, "L B H D Dv"]]:
    """The rule for one token of each row, in the place of one layer's states among those of all layers.

    Args:
        q: queries; unit vectors, where the model has them so.
        k: keys, the same.
        v: values, whose dtype is that of q and k.
        decay: float32, as of `gated_delta`; with 0 and a beta of 0 the state stays as it is.
        beta: float32, as there.
        states: float32, before the token; the call may write its results there.
        layer: which of them, int32.
        scale: factor of the output.
        implementation: None, "triton" or "xla".

    Returns:
        The output in v's dtype, and the states of all layers, after the token those of this one. Not
        differentiable: decoding has no backward pass.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or several tokens a row.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    check("gated_delta_token", (q, k, v, decay, beta), None, states.shape[1:])
    if v.shape[1] != 1:
        raise ValueError(f"gated_delta_token: v: expected one token a row, got {v.shape[1]}")
    facts = {"dtype": v.dtype, "sizes": states.shape[-2:], "states": states.size}
    chosen = REGISTRY.chosen(implementation, **facts)
    scale = number("gated_delta_token", "scale", scale)
    return chosen.forward(q, k, v, decay, beta, states, jnp.asarray(layer, jnp.int32), scale)


def in_xla(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, states: Array, layer: Array, scale: float
) -> tuple[Array, Array]:
    """The output, and the states of all layers."""
    (batch, _, heads, size), key_heads, precise = v.shape, k.shape[2], wide(v.dtype)
    q, k = (array[:, 0].astype(precise)[:, :, None, :, None] for array in (q, k))  # [B, K, 1, D, 1]
    kept, written, v = (
        array[:, 0].astype(precise).reshape(batch, key_heads, heads // key_heads, 1, -1)
        for array in (jnp.exp(decay.astype(precise)), beta, v)
    )
    before = states[layer].reshape(batch, key_heads, heads // key_heads, *states.shape[3:])
    seen, read = (kept * jnp.sum(array * before, axis=3, keepdims=True) for array in (k, q))
    new = written * (v - seen)
    out = scale * (read + jnp.sum(k * q, axis=3, keepdims=True) * new)
    after = (kept * before + k * new).reshape(states.shape[1:])
    return out.reshape(batch, 1, heads, size).astype(v.dtype), states.at[layer].set(after)


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def in_triton(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    states: Array,
    layer: Array,
    scale: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The output, and the states of all layers in the place where they were."""
    q, k, v, decay, beta = (array[:, 0] for array in (q, k, v, decay, beta))
    batch, heads, size = v.shape
    out, states = pl.pallas_call(
        functools.partial(_token, scale=scale, groups=heads // k.shape[1]),
        out_shape=(jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(states.shape, states.dtype)),
        grid=(size // _COLUMNS, heads, batch),
        input_output_aliases={6: 1},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_token",
    )(q, k, v, decay, beta, layer[None], states)
    return out[:, None], states


def _token(q_ref, k_ref, v_ref, decay_ref, beta_ref, layer_ref, before_ref, out_ref, after_ref, *, scale, groups: int):
    part, head, row = (pl.program_id(axis) for axis in range(3))
    columns = pl.ds(part * _COLUMNS, _COLUMNS)
    place = layer_ref[0], row, head, slice(None), columns
    q, k = (pltriton.load(ref.at[row, head // groups, :]).astype(jnp.float32) for ref in (q_ref, k_ref))
    v = pltriton.load(v_ref.at[row, head, columns]).astype(jnp.float32)
    before = jnp.exp(decay_ref[row, head]) * pltriton.load(before_ref.at[place])
    new = beta_ref[row, head] * (v - jnp.sum(k[:, None] * before, axis=0))
    out = scale * (jnp.sum(q[:, None] * before, axis=0) + jnp.sum(k * q) * new)
    pltriton.store(out_ref.at[row, head, columns], out.astype(out_ref.dtype))
    pltriton.store(after_ref.at[place], before + k[:, None] * new[None])


#: forward(q, k, v, decay, beta, states, layer, scale) -> (output, states of all layers)
REGISTRY = triton_or_xla(
    "gated_delta_token",
    Implementation(in_triton, dtypes=HALF, why_not=why_not_triton),
    Implementation(in_xla),
)
