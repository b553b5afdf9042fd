"""Short causal convolutions (as in arXiv 2312.00752 and 2412.06464): the public function.

It has one implementation, of which XLA makes one pass in each direction: the backward pass computes sums again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array as JaxArray
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.transformations import custom_vjp, with_automatic_axes

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
    operands = x, weight, bias, before, segment_ids
    return with_automatic_axes(lambda *given: _convolved(*given, activation), *operands, rows_like=x)


class _Rows(NamedTuple):
    """Rows with zeros behind them, and what came before.

    Attributes:
        tokens: [B, T-1 + S + T-1, C], wide.
        ids: of documents, [B, T-1 + S + T-1]; None: a row is one.
    """

    tokens: JaxArray
    ids: JaxArray | None

    def at(self, place: int, length: int) -> JaxArray:
        """The tokens from a place on."""
        return self.tokens[:, place : place + length]

    def of_document(self, term: JaxArray, place: int, other: int) -> JaxArray:
        """A term of tokens from a place on, and zeros where those from another on are of other documents."""
        if self.ids is None or place == other:
            return term
        one, two = (self.ids[:, start : start + term.shape[1]] for start in (place, other))
        return jnp.where((one == two)[..., None], term, 0)


def _rows(x: JaxArray, before: JaxArray | None, segment_ids: JaxArray | None, reach: int) -> _Rows:
    behind = ((0, 0), (0, reach), (0, 0))
    if before is None:
        tokens = jnp.pad(x, ((0, 0), (reach, reach), (0, 0)))
    else:
        tokens = jnp.pad(jnp.concatenate([before.astype(x.dtype), x], axis=1), behind)
    if segment_ids is not None:  # what came before is of the first document, and nothing behind is of any
        segment_ids = jnp.pad(jnp.pad(segment_ids, ((0, 0), (reach, 0)), mode="edge"), behind[:2], constant_values=-1)
    return _Rows(tokens.astype(_wide(x)), segment_ids)


def _wide(x: JaxArray) -> DTypeLike:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _sums(rows: _Rows, weight: JaxArray, bias: JaxArray | None, place: int, length: int) -> JaxArray:
    """The sums of the tokens from a place on."""
    total, reach = jnp.zeros((1, 1, 1), weight.dtype) if bias is None else bias[None, None], weight.shape[1] - 1
    for back in range(reach, -1, -1):
        term = rows.at(place - back, length) * weight[None, None, :, reach - back]
        total = total + rows.of_document(term, place - back, place)
    return total


def _forward(x, weight, bias, before, segment_ids, activation: str | None) -> JaxArray:
    reach, wide = weight.shape[1] - 1, _wide(x)
    rows, bias = _rows(x, before, segment_ids, reach), None if bias is None else bias.astype(wide)
    total = _sums(rows, weight.astype(wide), bias, reach, x.shape[1])
    return (jax.nn.silu(total) if activation == "silu" else total).astype(x.dtype)


@custom_vjp(nondiff_argnums=(5,))
def _convolved(x, weight, bias, before, segment_ids, activation):
    return _forward(x, weight, bias, before, segment_ids, activation)


def _kept(x, weight, bias, before, segment_ids, activation):
    return _forward(x, weight, bias, before, segment_ids, activation), (x, weight, bias, before, segment_ids)


def _backward(activation, residuals, gradient):
    """Every gradient of a sum is made where it is read: each array is read in one pass, and none of float32 written."""
    x, weight, bias, before, segment_ids = residuals
    length, reach, wide = x.shape[1], weight.shape[1] - 1, _wide(x)
    rows, factors = _rows(x, before, segment_ids, reach), weight.astype(wide)
    offset = None if bias is None else bias.astype(wide)
    given = jnp.pad(gradient, ((0, 0), (reach, reach), (0, 0))).astype(wide)

    def of_sums(place: int, count: int) -> JaxArray:
        own = given[:, place : place + count]
        if activation is None:
            return own
        total = _sums(rows, factors, offset, place, count)
        gate = jax.nn.sigmoid(total)
        return own * gate * (1 + total * (1 - gate))

    def of_tokens(place: int, count: int) -> JaxArray:
        total = jnp.zeros((1, 1, 1), wide)
        for ahead in range(reach + 1):
            if place + ahead >= reach:  # before the row there are no sums
                term = of_sums(place + ahead, count) * factors[None, None, :, reach - ahead]
                total = total + rows.of_document(term, place + ahead, place)
        return total

    dx = of_tokens(reach, length).astype(x.dtype)
    dbefore = None
    if before is not None:
        dbefore = jnp.concatenate([of_tokens(place, 1) for place in range(reach)], axis=1).astype(before.dtype)
    own = of_sums(reach, length)
    taps = [
        jnp.sum(rows.of_document(own * rows.at(reach - back, length), reach - back, reach), axis=(0, 1))
        for back in range(reach, -1, -1)
    ]
    dbias = None if bias is None else jnp.sum(own, axis=(0, 1)).astype(bias.dtype)
    return dx, jnp.stack(taps, axis=1).astype(weight.dtype), dbias, dbefore, None


_convolved.defvjp(_kept, _backward)
