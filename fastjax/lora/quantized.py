"""A projection through a fake quantiser, as one differentiable unit: y = q(x)·Q(W + s·B·A)ᵀ.

Q is the exact quantiser of the merged folder: of W in float32 plus s·(B·A), as the merge adds them, or of a trained W
alone, rounded to the folder's dtype as merge and save do. So what is trained is what the quantised folder computes. The
unit keeps x alone and quantises again in the backward pass.

Gradients pass straight through Q and q (`quantization.fake`). Where a format has no values out of its range, those of A
and B are the thin products of LoRA; else dyᵀ·q(x) is formed, one projection at a time, masked, and multiplied by A and
B. A trained W gets that product itself. While `quantizing` is false the projection is as it would be without a
quantiser.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fastjax.lora.linear import describe, matrices_of, project
from fastjax.lora.params import LoraLinear
from fastjax.lora.rank_products import Matrices, PartSpec, into_dtypes, over_tokens
from fastjax.lora.units import row_slices, unit
from fastjax.quantization.dense import linear
from fastjax.quantization.fake import Scheme, fake_quantize
from fastjax.quantization.weights import WeightLike, as_weight
from fastjax.residuals import name_residual
from pallas_kernels.rounding import round_through

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """The quantisation of a projection.

    Attributes:
        weights: the format of the weights.
        activations: of the inputs; None: they stay.
        dtype: of the folder's weights.
        trained: whether the weight itself is trained.
        copies: whether a merge copies what has no adapter, since the folder is quantised already.
    """

    weights: Scheme
    activations: Scheme | None
    dtype: str
    trained: bool = False
    copies: bool = False


class _Call(NamedTuple):
    """The static part of a call."""

    quantizer: Quantizer
    parts: tuple[PartSpec, ...]


def project_quantized(
    quantizer: Quantizer,
    sizes: Sequence[tuple[str, int]],
    weight: WeightLike,
    adapters: Mapping[str, LoraLinear],
    x: Float[Array, "B S in"],
    residual: Float[Array, "B S out"] | None = None,
    quantizing: Bool[Array, ""] | None = None,
) -> Float[Array, "B S out"]:
    """The parts' outputs side by side, without bias, in the dtype of x.

    Args:
        quantizer: of the projection.
        sizes: as in `linear.project`.
        weight: as there; a packed one is in the quantiser's format.
        adapters: as there, without DoRA and dropout.
        x: as there.
        residual: as there.
        quantizing: whether the quantiser is in force; None: it is.
    """
    lora = {name: adapters[name] for name, _ in sizes if name in adapters}
    y = _unit(_Call(quantizer, describe(sizes, lora)), x, weight, matrices_of(lora), quantizing)
    return name_residual(y if residual is None else residual + y, "projection")


def quantized_weight(
    quantizer: Quantizer, parts: Sequence[PartSpec], weight: WeightLike, matrices: Matrices
) -> tuple[Float[Array, "out in"], Bool[Array, "out in"] | None]:
    """The values that the product reads, float32, and where the merged ones lie in the format's range; None: all do.

    Args:
        quantizer: of the projection.
        parts: of the weight; each is a tensor of its own in the folder.
        weight: [out, in].
        matrices: A and B.
    """
    base, merged = as_weight(weight).dequantize(jnp.float32), []
    for part, here in zip(parts, row_slices(part.rows for part in parts), strict=True):
        tensor = base[here]
        if part.rank:
            a, b = (matrix.astype(jnp.float32) for matrix in matrices[part.name])
            tensor = linear(b, a.T) * part.scaling + tensor
        merged.append(tensor if quantizer.copies and not part.rank else round_through(tensor, quantizer.dtype))
    top = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(tensor)) for tensor in merged))
    decoded = [
        (tensor, None) if quantizer.copies and not part.rank else _decoded(quantizer, tensor, top)
        for part, tensor in zip(parts, merged, strict=True)
    ]
    values, masks = (list(each) for each in zip(*decoded, strict=True))
    whole = jnp.concatenate(values)
    return whole, None if masks[0] is None else jnp.concatenate(masks)


def _decoded(quantizer: Quantizer, tensor: Array, top: Array) -> tuple[Array, Array | None]:
    """The values that a folder's tensor decodes to."""
    values, inside = quantizer.weights(tensor, top, quantizer.dtype)
    return round_through(values, quantizer.dtype), inside


def _forward(call: _Call, x, weight, matrices, quantizing):
    def quantized() -> Array:
        read, values, _ = _when_needed(call, x, weight, matrices)
        return linear(_input(call, read), values)

    y = _choose(quantizing, quantized, lambda: _plain(call, x, weight, matrices))
    return y, (x, weight, matrices, quantizing)


def _backward(call: _Call, residuals, dy):
    x, weight, matrices, quantizing = residuals

    def quantized() -> Any:
        gradient, values, inside = _when_needed(call, dy, weight, matrices)
        read, pull_back = jax.vjp(functools.partial(_input, call), x)
        (dx,) = pull_back(linear(gradient, values.T))
        if not call.quantizer.trained and inside is None:
            return dx, None, _thin(call, gradient, read, matrices)
        dvalues = over_tokens(gradient, read)
        dvalues = dvalues if inside is None else jnp.where(inside, dvalues, 0.0)
        if call.quantizer.trained:
            return dx, dvalues.astype(weight.dtype), {}
        return dx, None, _dense(call, dvalues, matrices)

    def plain() -> Any:
        if call.quantizer.trained:
            dx, dweight = jax.vjp(lambda x, weight: _plain(call, x, weight, {}), x, weight)[1](dy)
            return dx, dweight, {}
        dx, gradients = jax.vjp(lambda x, matrices: _plain(call, x, weight, matrices), x, matrices)[1](dy)
        return dx, None, gradients

    return *_choose(quantizing, quantized, plain), None


_unit = unit(_forward, _backward)


def _choose(quantizing: Array | None, quantized: Callable[[], T], plain: Callable[[], T]) -> T:
    return quantized() if quantizing is None else jax.lax.cond(quantizing, quantized, plain)


def _when_needed(call: _Call, x: Array, weight: WeightLike, matrices: Matrices) -> tuple[Array, Array, Array | None]:
    """x, and `quantized_weight` in its dtype: made no earlier than x is there, not inside of the product."""
    weight, x = jax.lax.optimization_barrier((weight, x))
    values, inside = quantized_weight(call.quantizer, call.parts, weight, matrices)
    return x, jax.lax.optimization_barrier(values.astype(x.dtype)), inside


def _input(call: _Call, x: Float[Array, "B S in"]) -> Float[Array, "B S in"]:
    """The tokens through the format of activations."""
    scheme = call.quantizer.activations
    if scheme is None:
        return x
    tokens: Any = fake_quantize(x.reshape(-1, x.shape[-1]), scheme)
    return tokens.reshape(x.shape)


def _plain(call: _Call, x: Array, weight: WeightLike, matrices: Matrices) -> Array:
    """The projection without a quantiser."""
    adapters = {
        part.name: LoraLinear(matrices[part.name][0], matrices[part.name][1], None, scaling=part.scaling, dropout=0.0)
        for part in call.parts
        if part.rank
    }
    return project([(part.name, part.rows) for part in call.parts], weight, adapters, x, None)


def _thin(call: _Call, dy: Array, read: Array, matrices: Matrices) -> dict[str, tuple[Array, Array]]:
    """Gradients of A and B, the small dimension first."""
    gradients = {}
    for part, here in zip(call.parts, row_slices(part.rows for part in call.parts), strict=True):
        if part.rank:
            a, b = matrices[part.name]
            product, dpart = linear(read, a), dy[..., here]
            dproduct = linear(dpart, (b.astype(jnp.float32) * part.scaling).T)
            gradients[part.name] = over_tokens(dproduct, read), over_tokens(dpart, product) * part.scaling
    return into_dtypes(gradients, matrices)


def _dense(call: _Call, dvalues: Array, matrices: Matrices) -> dict[str, tuple[Array, Array]]:
    """Gradients of A and B from that of the merged weight."""
    gradients = {}
    for part, here in zip(call.parts, row_slices(part.rows for part in call.parts), strict=True):
        if part.rank:
            a, b = (matrix.astype(jnp.float32) for matrix in matrices[part.name])
            dpart = dvalues[here] * part.scaling
            gradients[part.name] = linear(b.T, dpart.T), linear(dpart, a)
    return into_dtypes(gradients, matrices)
