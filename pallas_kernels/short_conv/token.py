"""A short convolution for one token a row after others, as decoding has it; inputs stay in their place."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import HALF, Implementation, Target, triton_or_xla
from pallas_kernels.glu.reference import ACTIVATIONS
from pallas_kernels.short_conv.api import short_conv
from pallas_kernels.transformations import number


def short_conv_token(
    x: Float[Array, "B 1 N"],
    weight: Float[Array, "C T"],
    inputs: Float[Array, "L R T-1 C"],
    layer: Int[Array, ""] | int,
    rows: Int[Array, "B"],
    *,
    activation: str,
    units: tuple[int, int],
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 C"], Float[Array, "L R T-1 C"]]:
    """activation(Σ_j weight[:, j] · the j-th of the last T inputs), of which the first heads become unit vectors.

    Sums are float32. What is activated is rounded, and so is a unit vector x / √(Σx² + ε), as `short_conv` and
    `rms_norm` round them one after the other.

    Args:
        x: a token of each row, any floating dtype; features behind the C channels have no part in it.
        weight: a channel's factors of its last T tokens, the current one's last; a dtype of its own.
        inputs: before the token, the newest last, any floating dtype; the call may write its results there.
        layer: which of them, int32.
        rows: the row of each token, int32, no two alike; R: none, whose sums are zeros.
        activation: Hugging Face's name.
        units: how many heads become unit vectors, and the channels of a head.
        eps: added to a unit vector's sum of squares.
        implementation: None, "triton" or "xla".

    Returns:
        The sums in x's dtype, and the inputs of all layers and rows, after the token those of this layer's rows. Not
        differentiable: decoding has no backward pass.

    Raises:
        ValueError: shapes that do not fit together, more unit vectors than channels, or an unknown activation.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    batch, reach, channels = x.shape[0], *inputs.shape[2:]
    expected = {
        "x": (x.shape, (batch, 1, max(channels, x.shape[2]))),
        "weight": (weight.shape, (channels, reach + 1)),
        "rows": (rows.shape, (batch,)),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise ValueError(f"short_conv_token: {name}: expected shape {wanted}, got {given}, for x {x.shape}")
    if units[0] * units[1] > channels:
        raise ValueError(f"short_conv_token: units: expected heads of at most {channels} channels in all, got {units}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"short_conv_token: activation: expected one of {(*ACTIVATIONS,)}, got {activation!r}")
    facts = {"dtype": x.dtype, "kept": inputs.dtype, "channels": channels, "size": units[1], "numbers": inputs.size}
    chosen = REGISTRY.chosen(implementation, **facts)
    eps = number("short_conv_token", "eps", eps)
    return chosen.forward(x, weight, inputs, jnp.asarray(layer, jnp.int32), rows, activation, units, eps)


def in_xla(
    x: Array,
    weight: Array,
    inputs: Array,
    layer: Array,
    rows: Array,
    activation: str,
    units: tuple[int, int],
    eps: float,
) -> tuple[Array, Array]:
    """The sums, and the inputs of all layers and rows."""
    before, (count, size) = inputs.at[layer, rows].get(mode="clip"), units
    x = x[..., : inputs.shape[3]]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    total = short_conv(x.astype(wide), weight, activation=None, before=before.astype(wide))
    y = ACTIVATIONS[activation](total).astype(x.dtype)
    heads = y[..., : count * size].astype(wide).reshape(len(x), 1, count, size)
    heads = heads * jax.lax.rsqrt(jnp.sum(heads * heads, axis=-1, keepdims=True) + eps)
    y = jnp.concatenate([heads.astype(x.dtype).reshape(len(x), 1, -1), y[..., count * size :]], axis=-1)
    y = jnp.where((rows < inputs.shape[1])[:, None, None], y, 0)
    last = jnp.concatenate([before[:, 1:], x.astype(inputs.dtype)], axis=1)
    return y, inputs.at[layer, rows].set(last, mode="drop")


@functools.partial(jax.jit, static_argnames=("activation", "units", "eps", "interpret"))
def in_triton(
    x: Array,
    weight: Array,
    inputs: Array,
    layer: Array,
    rows: Array,
    activation: str,
    units: tuple[int, int],
    eps: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The sums, and the inputs of all layers and rows in the place where they were."""
    x = x[:, 0]
    y, inputs = pl.pallas_call(
        functools.partial(_token, activation=activation, units=units, eps=eps),
        out_shape=(
            jax.ShapeDtypeStruct((len(x), inputs.shape[3]), x.dtype),
            jax.ShapeDtypeStruct(inputs.shape, inputs.dtype),
        ),
        grid=(inputs.shape[3] // units[1], len(x)),
        input_output_aliases={4: 1},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="short_conv_token",
    )(x, weight, layer[None], rows, inputs)
    return y[:, None], inputs


def _token(x_ref, weight_ref, layer_ref, rows_ref, before_ref, y_ref, after_ref, *, activation, units, eps):
    (head, token), (count, size) = (pl.program_id(axis) for axis in range(2)), units
    channels, row, layer = pl.ds(head * size, size), rows_ref[token], layer_ref[0]
    taps, result = weight_ref.shape[1], y_ref.at[token, channels]

    @pl.when(row < before_ref.shape[1])
    def _() -> None:
        last = [pltriton.load(before_ref.at[layer, row, jnp.int32(at), channels]) for at in range(taps - 1)]
        last.append(pltriton.load(x_ref.at[token, channels]))
        total = jnp.zeros(size, jnp.float32)
        for at, taken in enumerate(last):
            factors = pltriton.load(weight_ref.at[channels, jnp.int32(at)])
            total += taken.astype(jnp.float32) * factors.astype(jnp.float32)
        y = ACTIVATIONS[activation](total).astype(y_ref.dtype)
        wide = y.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.sum(wide * wide) + eps)
        pltriton.store(result, jnp.where(head < count, unit.astype(y_ref.dtype), y))
        for at, taken in enumerate(last[1:]):
            pltriton.store(after_ref.at[layer, row, jnp.int32(at), channels], taken.astype(after_ref.dtype))

    @pl.when(row >= before_ref.shape[1])
    def _() -> None:
        pltriton.store(result, jnp.zeros(size, y_ref.dtype))


def _why_not(_: Target, dtype: DTypeLike, kept: DTypeLike, channels: int, size: int, numbers: int) -> str | None:
    if kept != dtype:
        return f"it keeps inputs in the dtype of x, {dtype}, not in {kept}"
    if size not in (32, 64, 128, 256) or channels % size:
        return f"it takes {channels} channels in heads of 32, 64, 128 or 256, not of {size}"
    return f"its offsets are of 32 bits, and the inputs have {numbers} numbers" if numbers >= 2**31 else None


#: forward(x, weight, inputs, layer, rows, activation, units, eps) -> (sums, inputs of all layers and rows)
REGISTRY = triton_or_xla(
    "short_conv_token",
    Implementation(in_triton, dtypes=HALF, why_not=_why_not),
    Implementation(in_xla),
)
