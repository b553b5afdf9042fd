"""The two ways to multiply by a packed matrix: decoding inside the product, and before it."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, UInt8

from pallas_kernels.dispatch import num_cores
from pallas_kernels.nf4 import config, mosaic_sm90
from pallas_kernels.nf4.codebook import BLOCK
from pallas_kernels.shard_gather import Shared, whole
from pallas_kernels.transformations import known

#: Fewer rows are multiplied in the time in which the weight is read.
_FEW_ROWS = 128


def fused(
    x: Float[Array, "*rows summed"],
    codes: UInt8[Array, "..."] | Shared,
    absmax: Float[Array, "..."],
    quant_map: None,
    *,
    shape: tuple[int, int],
    order: str,
    through: str | None,
    gradient: bool,
    dtype: DTypeLike,
) -> Float[Array, "*rows columns"]:
    """X Wᵀ, or x W for the gradient, in `dtype` by the kernel of `config.product_config`; arguments as in `api`."""
    del quant_map, order
    rows = x.reshape(-1, x.shape[-1])
    pieces = fused_addends(rows, codes, absmax, shape=shape, through=through, gradient=gradient)
    product = (pieces[0] if len(pieces) == 1 else jnp.sum(pieces, axis=0)).astype(dtype)
    return product.reshape(*x.shape[:-1], product.shape[-1])


def fused_addends(
    x: Float[Array, "rows summed"],
    codes: UInt8[Array, "..."] | Shared,
    absmax: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    through: str | None,
    gradient: bool,
) -> Float[Array, "addends rows columns"]:
    """`fused` before its last sum: in float32, or one addend in the dtype of x."""
    (out, columns), cores = shape, num_cores()
    matrix = x, whole(codes).reshape(out, columns // 2), absmax.reshape(out, columns // BLOCK)
    sizes = config.product_config(len(x), shape, gradient, cores)
    if isinstance(sizes, config.MatvecConfig):
        return mosaic_sm90.matvec(*matrix, config=sizes, cores=cores)
    assert sizes is not None
    return mosaic_sm90.matmul_rs(*matrix, gradient=gradient, config=sizes, cores=cores, through=through)[None]


def decode_first(
    decode: Callable[..., Array],
    x: Float[Array, "*rows summed"],
    codes: UInt8[Array, "..."] | Shared,
    absmax: Float[Array, "..."],
    quant_map: Float[Array, " 16"] | None,
    *,
    shape: tuple[int, int],
    order: str,
    through: str | None,
    gradient: bool,
    dtype: DTypeLike,
) -> Float[Array, "*rows columns"]:
    """X Wᵀ, or x W for the gradient, in `dtype` with W decoded to memory, but no earlier than x is there.

    If it depended on the packed weight alone, the compiler could decode all layers' matrices at the start (XLA does, in
    one fusion), and would see that the forward and the backward pass decode the same bytes and keep the result between
    them. So one of the decode's operands is made to depend on x: the scales, the small one. A barrier on the codes
    would cost a copy of them where they are a slice of stacked layers, which XLA otherwise decodes where it lies.
    """
    absmax, x = lax.optimization_barrier((absmax, x))
    weight = decode(codes, absmax, quant_map, shape=shape, dtype=x.dtype, order=order, through=through)
    # XLA must not fuse a decode of its own into the product: that GEMM is several times slower than the two in turn.
    weight = lax.optimization_barrier(weight)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((x.ndim - 1,), (0 if gradient else 1,)), ((), ()))
    # Products in 16 bits are accumulated in float32, and of many rows XLA writes a float32 result, when it is asked for
    # one, before it converts it in a second kernel. Of few rows it splits the sums and adds their parts in the result's
    # dtype: those are asked for in float32, which costs nothing beside the reading of the weight.
    wide = jnp.float32 if known(math.prod(x.shape[:-1]), 0) < _FEW_ROWS else dtype
    return lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=wide).astype(dtype)
