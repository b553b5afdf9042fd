"""Matrices of every format through one door: `as_weight` wraps arrays, packed weights are themselves.

A format is one `Weight` class and one row of `WEIGHTS`, which names the class for tensors as `convert` reads them.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from convert.errors import ConvertError
from convert.formats import StackedTensor
from convert.formats.eight_bits_format import Int8Tensor
from convert.formats.fp8 import FP8Tensor
from convert.formats.int4 import Int4Tensor
from convert.formats.mxfp4 import MXFP4Tensor
from convert.formats.nf4 import NF4Tensor
from convert.formats.nvfp4 import NVFP4Tensor
from fastjax.quantization.dense import DenseWeight
from fastjax.quantization.four_bits import Int4Weight, MXFP4Weight, NVFP4Weight
from fastjax.quantization.fp8 import FP8Weight
from fastjax.quantization.nf4 import NF4Weight
from fastjax.quantization.weight import Axes, Weight

T = TypeVar("T")
#: A packed weight, or the array of a dense one.
WeightLike = Array | Weight
#: Class of a tensor on disk -> class of its weight, with `from_tensor`.
WEIGHTS: dict[type, Any] = {
    NF4Tensor: NF4Weight,
    FP8Tensor: FP8Weight,
    Int8Tensor: FP8Weight,
    Int4Tensor: Int4Weight,
    NVFP4Tensor: NVFP4Weight,
    MXFP4Tensor: MXFP4Weight,
}


def as_weight(weight: WeightLike) -> Weight:
    """A weight of the model's tree as a `Weight`."""
    return weight if isinstance(weight, Weight) else DenseWeight(weight)


def from_tensor(tensor: Any) -> Weight:
    """A tensor as `convert` reads it, without loss.

    Arrays go to the device by `jax.device_put`: `jnp.asarray` would compile a program for each shape, which copies.
    On a CPU the tensor's memory may become the weight's, so nobody writes to it any more.

    Raises:
        ConvertError: its format has a form that the weight's class does not serve, or experts differ in theirs.
    """
    if isinstance(tensor, StackedTensor):
        experts = [from_tensor(part) for part in tensor.tensors]
        if len({jax.tree.structure(expert) for expert in experts}) > 1:
            raise ConvertError("expected experts of one format, blocks and dtype, got several")
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
    packed = WEIGHTS.get(type(tensor))
    return DenseWeight(jax.device_put(tensor)) if packed is None else packed.from_tensor(tensor)


def matmul(x: Float[Array, "B S in"], weight: WeightLike) -> Float[Array, "B S out"]:
    """x·Wᵀ in the dtype of x, accumulated in float32; in true float32 where x is float32.

    A packed weight has the values that its format decodes to, in the dtype that its folder names, whatever x has.

    Args:
        x: activations; a gradient flows to them, and to a plain `weight`.
        weight: [out, in].
    """
    return as_weight(weight).matmul(x)


def decoded_scales(tree: T) -> T:
    """Arrays of a model whose NF4 weights have no nested scales, for a program that reads them many times.

    They take four bytes a block where nested ones take one, and no pass before each product.

    Args:
        tree: of weights and arrays; what is in the host's memory stays as it is.
    """

    def decoded(node: Any) -> Any:
        return node.decoded_scales() if isinstance(node, NF4Weight) else node

    return jax.tree.map(decoded, tree, is_leaf=lambda node: isinstance(node, NF4Weight))


def dequantize(weight: WeightLike, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
    """The whole matrix in `dtype`."""
    return as_weight(weight).dequantize(dtype)


def rows_of(weight: WeightLike, rows: slice) -> WeightLike:
    """Some of the output rows, such as those of one projection of a group."""
    return as_weight(weight).rows(rows).held


def concatenate(weights: Sequence[WeightLike]) -> WeightLike:
    """One weight below the other: one array or one set of codes where the formats agree, else a `MixedWeight`."""
    if len(weights) == 1:
        return weights[0]
    first, *others = (as_weight(weight) for weight in weights)
    joined = first.concatenate(others) if all(type(other) is type(first) for other in others) else None
    return MixedWeight(tuple(weights)) if joined is None else joined.held


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedWeight(Weight):
    """Weights of different formats that read the same input, one below the other ("dynamic" 4-bit folders).

    Attributes:
        weights: packed weights and arrays, from the top row down.
    """

    weights: tuple[WeightLike, ...]

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(out, in)."""
        return sum(piece.shape[0] for piece in self._pieces), self._pieces[0].shape[1]

    @property
    def formats(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The formats of its weights."""
        return tuple(dict.fromkeys(name for piece in self._pieces for name in piece.formats))

    def matmul(self, x: Float[Array, "B S in"]) -> Float[Array, "B S out"]:
        """x·Wᵀ in the dtype of x; each weight has its own gradient."""
        return jnp.concatenate([piece.matmul(x) for piece in self._pieces], axis=-1)

    def matmul_into(self, x: Float[Array, "B S in"], dtype: jax.typing.DTypeLike) -> Float[Array, "B S out"]:
        """x·Wᵀ in a dtype."""
        return jnp.concatenate([piece.matmul_into(x, dtype) for piece in self._pieces], axis=-1)

    def transposed(self, dy: Float[Array, "B S out"]) -> Float[Array, "B S in"]:
        """dy·W in the dtype of dy."""
        products = [piece.transposed(part) for part, piece in zip(self._parts(dy), self._pieces, strict=True)]
        return functools.reduce(operator.add, products)

    def gradient(self, dy: Float[Array, "B S out"], x: Float[Array, "B S in"]) -> "MixedWeight":
        """The weights' gradients, None for frozen ones."""
        return MixedWeight(tuple(p.gradient(part, x) for part, p in zip(self._parts(dy), self._pieces, strict=True)))

    def rows(self, rows: slice) -> Weight:
        """Some of the output rows; a weight that lies whole in them stays as it is."""
        pieces, start = [], 0
        for piece in self._pieces:
            first, last = max(rows.start - start, 0), min(rows.stop - start, piece.shape[0])
            if first < last:
                whole = (first, last) == (0, piece.shape[0])
                pieces.append(piece.held if whole else piece.rows(slice(first, last)).held)
            start += piece.shape[0]
        return as_weight(concatenate(pieces))

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The whole matrix in `dtype`."""
        return jnp.concatenate([piece.dequantize(dtype) for piece in self._pieces])

    def axes(self, out: str | None, into: str | None) -> Axes:
        """The axes of its weights' arrays."""
        return MixedWeight(tuple(piece.axes(out, into) for piece in self._pieces))

    @property
    def _pieces(self) -> list[Weight]:
        return [as_weight(weight) for weight in self.weights]

    def _parts(self, dy: Float[Array, "B S out"]) -> list[Array]:
        """The columns of each weight."""
        ends = np.cumsum([piece.shape[0] for piece in self._pieces])
        return jnp.split(dy, ends[:-1].tolist(), axis=-1)
