"""One `matmul` for every kind of frozen weight: the kind of the weight chooses what happens."""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fastjax.parallel import BATCH, local
from fastjax.quantization.fp8 import FP8Weight, concatenate_fp8, matmul_fp8
from fastjax.quantization.nf4 import NF4Weight, concatenate_nf4
from pallas_kernels import nf4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedWeight:
    """Weights of different formats that read the same input, one below the other ("dynamic" 4-bit folders)."""

    weights: tuple["Weight", ...]


Packed = NF4Weight | FP8Weight
Weight = Array | Packed | MixedWeight


def matmul(x: Float[Array, "B S in"], weight: Weight) -> Float[Array, "B S out"]:
    """x·Wᵀ in the dtype of x, accumulated in float32; in true float32 where x is float32.

    A packed weight has the values that its format decodes to, in the dtype that its folder names, whatever x has.

    Args:
        x: activations; a gradient flows to them, and to a plain `weight`.
        weight: [out, in]: an array (cast to the dtype of x), NF4 or FP8 codes, or several of these one below the
            other.
    """
    if isinstance(weight, MixedWeight):
        return jnp.concatenate([matmul(x, w) for w in weight.weights], axis=-1)
    if isinstance(weight, NF4Weight):

        def product(x, codes, scales, quant_map):
            return nf4.matmul(
                x,
                codes,
                scales,
                shape=weight.shape,
                order=weight.order,
                quant_map=quant_map,
                weight_dtype=weight.dtype,
            )

        island = local(product, in_specs=(P(BATCH), P(), P(), P()), out_specs=P(BATCH))
        return island(x, weight.codes, weight.scales(), weight.quant_map)
    return matmul_fp8(x, weight) if isinstance(weight, FP8Weight) else linear(x, weight)


def matmul_transposed(dy: Float[Array, "B S out"], weight: Weight) -> Float[Array, "B S in"]:
    """dy·W, what `matmul` passes back to its input, in the dtype of dy.

    Args:
        dy: the product's gradient.
        weight: as in `matmul`.
    """
    if isinstance(weight, MixedWeight):
        ends = np.cumsum([out_features(w) for w in weight.weights])
        pieces = zip(jnp.split(dy, ends[:-1].tolist(), axis=-1), weight.weights, strict=True)
        return functools.reduce(operator.add, [matmul_transposed(piece, w) for piece, w in pieces])
    if isinstance(weight, Packed):
        # The product that is linear in x; it is not computed, only its transpose is.
        _, pullback = jax.vjp(lambda x: matmul(x, weight), jnp.zeros((*dy.shape[:-1], weight.shape[1]), dy.dtype))
        return pullback(dy)[0]
    return linear(dy, weight.T)


def weight_gradient(dy: Float[Array, "B S out"], x: Float[Array, "B S in"], weight: Weight) -> Weight | None:
    """dyᵀ·x, what `matmul` passes back to a plain weight, in its dtype; None in the place of packed ones.

    Args:
        dy: the product's gradient.
        x: its input.
        weight: as in `matmul`.
    """
    if isinstance(weight, Packed):
        return None
    if isinstance(weight, MixedWeight):
        ends = np.cumsum([out_features(w) for w in weight.weights])
        pieces = zip(jnp.split(dy, ends[:-1].tolist(), axis=-1), weight.weights, strict=True)
        return MixedWeight(tuple(weight_gradient(piece, x, w) for piece, w in pieces))  # pyright: ignore
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((0, 1), (0, 1)), ((), ()))
    return jax.lax.dot_general(dy, x, dims, precision=precision).astype(weight.dtype)


def linear(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Float[Array, "... out"]:
    """x·Wᵀ for a plain matrix, in the dtype of x, accumulated in float32 (highest precision for float32)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight.astype(x.dtype), contract, precision=precision)


def dense(weight: Weight, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
    """The whole matrix in `dtype`."""
    if isinstance(weight, MixedWeight):
        return jnp.concatenate([dense(w, dtype) for w in weight.weights])
    return weight.dequantize(dtype) if isinstance(weight, Packed) else weight.astype(dtype)


def concatenate(weights: Sequence[Weight]) -> Weight:
    """One weight below the other: one array or one set of codes where the formats agree."""
    if len(weights) == 1:
        return weights[0]
    if all(isinstance(w, NF4Weight) for w in weights):
        joined = concatenate_nf4([w for w in weights if isinstance(w, NF4Weight)])
        return MixedWeight(tuple(weights)) if joined is None else joined
    if all(isinstance(w, FP8Weight) for w in weights):
        joined = concatenate_fp8([w for w in weights if isinstance(w, FP8Weight)])
        return MixedWeight(tuple(weights)) if joined is None else joined
    arrays = [w for w in weights if not isinstance(w, Packed | MixedWeight)]
    if len(arrays) == len(weights) and len({w.dtype for w in arrays}) == 1:
        return jnp.concatenate(arrays)
    return MixedWeight(tuple(weights))


def part(weight: Weight, index: int, rows: slice) -> Weight:
    """One of the weights that lie one below the other.

    Args:
        weight: several parts.
        index: number of the part.
        rows: its rows in the whole.
    """
    if isinstance(weight, MixedWeight):
        return weight.weights[index]
    return weight.rows(rows) if isinstance(weight, Packed) else weight[rows]


def out_features(weight: Weight) -> int:
    """Output rows of a weight (of one layer)."""
    if isinstance(weight, MixedWeight):
        return sum(out_features(w) for w in weight.weights)
    return weight.shape[0]
