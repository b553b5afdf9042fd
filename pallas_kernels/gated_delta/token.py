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
from pallas_kernels.gated_delta.calls import why_not_triton
from pallas_kernels.gated_delta.chunks import wide
from pallas_kernels.transformations import number

#: Columns of a state that a program has.
_COLUMNS = 32


def gated_delta_token(
    heads: Float[Array, "B 1 2*K*D+H*Dv"],
    decay: Float[Array, "B 1 H"],
    beta: Float[Array, "B 1 H"],
    states: Float[Array, "L R H D Dv"],
    layer: Int[Array, ""] | int,
    rows: Int[Array, "B"],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 H Dv"], Float[Array, "L R H D Dv"]]:
    """The rule for one token of some rows, in the place of one layer's states among those of all layers and rows.

    Args:
        heads: queries, keys and values side by side; queries and keys are unit vectors, where the model has them so.
        decay: float32, as of `gated_delta`.
        beta: float32, as there.
        states: float32, before the token; the call may write its results there.
        layer: which of them, int32.
        rows: the row of each token, int32, no two alike; R: none, whose output is zeros.
        scale: factor of the output.
        implementation: None, "triton" or "xla".

    Returns:
        The output in the dtype of heads, and the states of all layers and rows, after the token those of this layer's
        rows. Not differentiable: decoding has no backward pass.

    Raises:
        ValueError: shapes that do not fit together.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    (batch, _, features), (count, size, value_size) = heads.shape, states.shape[2:]
    keys, rest = divmod(features - count * value_size, 2 * size)
    if rest or keys < 1 or count % keys:
        raise ValueError(
            f"gated_delta_token: heads: expected queries and keys of {size} and {count} values of {value_size}, "
            f"a multiple of the keys, side by side, got {features} features"
        )
    expected = {
        "heads": (heads.shape, (batch, 1, features)),
        "decay": (decay.shape, (batch, 1, count)),
        "beta": (beta.shape, (batch, 1, count)),
        "rows": (rows.shape, (batch,)),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise ValueError(f"gated_delta_token: {name}: expected axes {wanted}, got {given}, for heads {heads.shape}")
    facts = {"dtype": heads.dtype, "sizes": (size, value_size), "states": states.size}
    chosen = REGISTRY.chosen(implementation, **facts)
    scale = number("gated_delta_token", "scale", scale)
    return chosen.forward(heads, decay, beta, states, jnp.asarray(layer, jnp.int32), rows, scale)


def in_xla(
    heads: Array, decay: Array, beta: Array, states: Array, layer: Array, rows: Array, scale: float
) -> tuple[Array, Array]:
    """The output, and the states of all layers and rows."""
    (batch, _, features), (count, size, value_size) = heads.shape, states.shape[2:]
    dtype, keys = heads.dtype, (features - count * value_size) // (2 * size)
    precise = wide(dtype)
    parts = jnp.split(heads[:, 0].astype(precise), [keys * size, 2 * keys * size], axis=-1)
    q, k = (part.reshape(batch, keys, 1, size, 1) for part in parts[:2])
    kept, written, v = (
        array.astype(precise).reshape(batch, keys, count // keys, 1, -1)
        for array in (jnp.exp(decay.astype(precise)), beta, parts[2])
    )
    before = states.at[layer, rows].get(mode="clip").reshape(batch, keys, count // keys, size, value_size)
    seen, read = (kept * jnp.sum(array * before, axis=3, keepdims=True) for array in (k, q))
    new = written * (v - seen)
    out = scale * (read + jnp.sum(k * q, axis=3, keepdims=True) * new)
    out = jnp.where((rows < states.shape[1])[:, None, None, None], out.reshape(batch, 1, count, value_size), 0)
    after = (kept * before + k * new).reshape(batch, *states.shape[2:])
    return out.astype(dtype), states.at[layer, rows].set(after, mode="drop")


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def in_triton(
    heads: Array,
    decay: Array,
    beta: Array,
    states: Array,
    layer: Array,
    rows: Array,
    scale: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The output, and the states of all layers and rows in the place where they were."""
    heads, decay, beta = (array[:, 0] for array in (heads, decay, beta))
    (batch, features), (count, size, value_size) = heads.shape, states.shape[2:]
    keys = (features - count * value_size) // (2 * size)
    out, states = pl.pallas_call(
        functools.partial(_token, scale=scale, keys=keys),
        out_shape=(
            jax.ShapeDtypeStruct((batch, count, value_size), heads.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ),
        grid=(value_size // _COLUMNS, count, batch),
        input_output_aliases={5: 1},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_token",
    )(heads, decay, beta, layer[None], rows, states)
    return out[:, None], states


def _token(heads_ref, decay_ref, beta_ref, layer_ref, rows_ref, before_ref, out_ref, after_ref, *, scale, keys: int):
    part, head, token = (pl.program_id(axis) for axis in range(3))
    _, of_rows, count, size, value_size = before_ref.shape
    columns, row = pl.ds(part * _COLUMNS, _COLUMNS), rows_ref[token]
    place, result = (layer_ref[0], row, head, slice(None), columns), out_ref.at[token, head, columns]

    def of_heads(first, features: int) -> Array:
        return pltriton.load(heads_ref.at[token, pl.ds(first, features)]).astype(jnp.float32)

    @pl.when(row < of_rows)
    def _() -> None:
        key = head // (count // keys)
        q, k = of_heads(key * size, size), of_heads((keys + key) * size, size)
        v = of_heads(2 * keys * size + head * value_size + part * _COLUMNS, _COLUMNS)
        before = jnp.exp(decay_ref[token, head]) * pltriton.load(before_ref.at[place])
        new = beta_ref[token, head] * (v - jnp.sum(k[:, None] * before, axis=0))
        out = scale * (jnp.sum(q[:, None] * before, axis=0) + jnp.sum(k * q) * new)
        pltriton.store(result, out.astype(out_ref.dtype))
        pltriton.store(after_ref.at[place], before + k[:, None] * new[None])

    @pl.when(row >= of_rows)
    def _() -> None:
        pltriton.store(result, jnp.zeros(_COLUMNS, out_ref.dtype))


#: forward(heads, decay, beta, states, layer, rows, scale) -> (output, states of all layers and rows)
REGISTRY = triton_or_xla(
    "gated_delta_token",
    Implementation(in_triton, dtypes=HALF, why_not=why_not_triton),
    Implementation(in_xla),
)
