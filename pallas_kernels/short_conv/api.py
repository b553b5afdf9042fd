"""Short causal convolutions (as in arXiv 2312.00752 and 2412.06464): the public function.

It has one implementation, which XLA makes one pass of: the backward pass computes the sums again from the inputs.
"""

import jax
import jax.numpy as jnp
from jax import Array as JaxArray
from jaxtyping import Array, Float, Int

from pallas_kernels.transformations import custom_vjp

_ACTIVATIONS = (None, "silu")


def short_conv(
    x: Float[Array, "B S C"],
    weight: Float[Array, "C T"],
    *,
    bias: Float[Array, " C"] | None = None,
    activation: str | None = "silu",
    segment_ids: Int[Array, "B S"] | None = None,
    before: Float[Array, "B T-1 C"] | None = None,
) -> Float[Array, "B S C"]:
    """activation(bias + Σ_j weight[:, j] · x[s - (T - 1) + j]) for each channel, over the last T tokens of a document.

    Sums are float32 and rounded once. What came before a document has no part in its sums.

    Args:
        x: tokens, any floating dtype.
        weight: a channel's factors of its last T tokens, the current one's last; a dtype of its own.
        bias: of each channel.
        activation: "silu" or None.
        segment_ids: int32, the documents of each row, each in one piece; None: a row is one.
        before: inputs before the row's first token, which belong to its document; None: there are none.

    Returns:
        The sums in x's dtype. Differentiable in x, weight, bias and before; the backward pass keeps these alone.

    Raises:
        ValueError: shapes that do not fit together, or an unknown activation.
    """
    batch, length, channels = x.shape
    reach = weight.shape[1] - 1
    expected = {
        "weight": (weight.shape, (channels, reach + 1)),
        "bias": ((channels,) if bias is None else bias.shape, (channels,)),
        "segment_ids": ((batch, length) if segment_ids is None else segment_ids.shape, (batch, length)),
        "before": ((batch, reach, channels) if before is None else before.shape, (batch, reach, channels)),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise ValueError(f"short_conv: {name}: expected shape {wanted}, got {given}, for x {x.shape}")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"short_conv: activation: expected one of {_ACTIVATIONS}, got {activation!r}")
    return _convolved(x, weight, bias, before, segment_ids, activation)


def _forward(
    x: JaxArray,
    weight: JaxArray,
    bias: JaxArray | None,
    before: JaxArray | None,
    segment_ids: JaxArray | None,
    activation: str | None,
) -> JaxArray:
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    length, reach = x.shape[1], weight.shape[1] - 1
    if before is None:
        tokens = jnp.pad(x, ((0, 0), (reach, 0), (0, 0)))
    else:
        tokens = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    total = jnp.zeros((1, 1, 1), wide) if bias is None else bias.astype(wide)[None, None]
    for back in range(reach, -1, -1):
        at = reach - back
        term = tokens[:, at : at + length].astype(wide) * weight[None, None, :, at].astype(wide)
        if segment_ids is not None and back:
            # Of the tokens before the row all belong to its first document: numbers repeat there.
            ids = jnp.concatenate([jnp.repeat(segment_ids[:, :1], back, axis=1), segment_ids], axis=1)
            term = jnp.where((ids[:, :length] == segment_ids)[..., None], term, 0)
        total = total + term
    return (jax.nn.silu(total) if activation == "silu" else total).astype(x.dtype)


@custom_vjp(nondiff_argnums=(5,))
def _convolved(x, weight, bias, before, segment_ids, activation):
    return _forward(x, weight, bias, before, segment_ids, activation)


def _kept(x, weight, bias, before, segment_ids, activation):
    return _forward(x, weight, bias, before, segment_ids, activation), (x, weight, bias, before, segment_ids)


def _backward(activation, residuals, gradient):
    *operands, segment_ids = residuals

    def again(x, weight, bias, before):
        return _forward(x, weight, bias, before, segment_ids, activation)

    _, transpose = jax.vjp(again, *operands)
    return (*transpose(gradient), None)


_convolved.defvjp(_kept, _backward)
