"""Products of sorted rows with one NF4 matrix a group: the experts of a mixture whose weights stay packed.

Implementations; the first is preferred for few rows a group (decoding, short batches), where the packed weights are
most of what is read, and the second else, which decodes all matrices to memory:

- ``triton``: decodes as it multiplies; NVIDIA GPUs of compute capability 8.0 or more, 16 bits;
- ``decode_first``: `nf4.dequantize`, then `grouped_matmul`; everything.

Both multiply the same decoded values, those of `nf4.dequantize`; the order of their float32 sums differs.
"""

import functools
import math

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int, UInt8

from pallas_kernels import nf4
from pallas_kernels.dispatch import HALF, Implementation, Registry, Target
from pallas_kernels.grouped_matmul import triton_nf4
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_matmul_dx, why_not_any_kernel
from pallas_kernels.grouped_matmul.config import NF4_MOST_ROWS, nf4_config
from pallas_kernels.nf4.codebook import BLOCK
from pallas_kernels.transformations import known, with_automatic_axes


def grouped_nf4_matmul(
    x: Float[Array, "T K"],
    codes: UInt8[Array, "X out in/2"],
    absmax: Float[Array, "X out in/64"],
    group_sizes: Int[Array, " X"],
    *,
    shape: tuple[int, int],
    rows: Int[Array, " M"] | None = None,
    low_rank: tuple[Float[Array, "M R"], Float[Array, "X ..."]] | None = None,
    gradient: bool = False,
    weight_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """y_i = w[g(i)] x_i, or x_i w[g(i)] for the gradient, with w decoded from NF4 and x_i = x[rows[i]].

    Not differentiable: the gradient is a product of its own, and the weights are frozen.

    Args:
        x: [T, in], or [T, out] for the gradient; bfloat16, float16 or float32.
        codes: in the split order of `nf4.codebook`.
        absmax: float32, one a block.
        group_sizes: int32, as of `grouped_matmul`.
        shape: (out, in) of each matrix; in is a multiple of 64.
        rows: int32, row of x for each row of the result, in [0, T); None: x's own rows, M = T.
        low_rank: a second product to add, as of `grouped_matmul`, or `grouped_matmul_dx` for the gradient; None: none.
        gradient: multiply by the matrices instead of their transposes.
        weight_dtype: that values are rounded to before x's dtype, as in `nf4.dequantize`.
        implementation: None, "triton" or "decode_first".

    Returns:
        The products in x's dtype: [M, out], or [M, in] for the gradient.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    _check(x, codes, absmax, group_sizes, shape, rows, gradient)
    like = x if rows is None else rows
    chosen = REGISTRY.chosen(implementation, rows=like.shape[0], shape=(codes.shape[0], *shape), dtype=x.dtype)
    forward = functools.partial(chosen.forward, gradient=gradient, weight_dtype=weight_dtype)
    return with_automatic_axes(forward, x, codes, absmax, group_sizes, rows, low_rank, rows_like=like)


def _triton(x, codes, absmax, group_sizes, rows, low_rank, *, gradient: bool, weight_dtype: DTypeLike | None) -> Array:
    config = nf4_config((x if rows is None else rows).shape[0] / codes.shape[0], gradient)
    through = None if weight_dtype is None else jnp.dtype(weight_dtype).name
    if through in ("float32", x.dtype.name):
        through = None
    y = triton_nf4.matmul(x, codes, absmax, group_sizes, rows, gradient=gradient, through=through, config=config)
    if low_rank is None:
        return y
    z, b = low_rank
    return y + (grouped_matmul_dx if gradient else grouped_matmul)(z, b, group_sizes)


def _decode_first(
    x, codes, absmax, group_sizes, rows, low_rank, *, gradient: bool, weight_dtype: DTypeLike | None
) -> Array:
    groups, out, blocks = absmax.shape
    # Decoded no earlier than x is there, as in `nf4.products`, and not inside of a product of XLA's.
    absmax, x = lax.optimization_barrier((absmax, x))
    matrices = nf4.dequantize(
        codes, absmax, shape=(groups * out, blocks * BLOCK), dtype=x.dtype, weight_dtype=weight_dtype
    )
    matrices = lax.optimization_barrier(matrices).reshape(groups, out, blocks * BLOCK)
    return (grouped_matmul_dx if gradient else grouped_matmul)(x, matrices, group_sizes, rows=rows, low_rank=low_rank)


def _why_not_triton(device: Target, **facts) -> str | None:
    if reason := why_not_any_kernel(device, **facts):
        return reason
    packed = math.prod(facts["shape"]) // 2
    if packed >= 2**31:  # Pallas-Triton counts elements in 32 bits up to 4 GiB, however small they are.
        return f"it addresses less than 2 GiB of codes, these are {packed} bytes"
    return None


def _preference(_: Target, rows: int, shape: tuple[int, int, int], **facts) -> tuple[str, ...]:
    few = known(rows, math.inf) <= NF4_MOST_ROWS * shape[0]
    return ("triton", "decode_first") if few else ("decode_first", "triton")


REGISTRY = Registry(
    "grouped_nf4_matmul",
    {
        "triton": Implementation(_triton, capability=(8, 0), dtypes=HALF, why_not=_why_not_triton),
        "decode_first": Implementation(_decode_first),
    },
    _preference,
)


def _check(x, codes, absmax, group_sizes, shape, rows, gradient: bool) -> None:
    op, (out, columns) = "grouped_nf4_matmul", shape
    groups, width = group_sizes.shape[0], out if gradient else columns
    if columns % BLOCK:
        raise ValueError(f"{op}: expected rows of whole blocks of {BLOCK} elements, given a shape of {shape}")
    wanted = {
        "codes": (codes, (groups, out, columns // 2), (jnp.uint8,)),
        "absmax": (absmax, (groups, out, columns // BLOCK), (jnp.float32,)),
        "x": (x, (x.shape[0], width), (jnp.bfloat16, jnp.float16, jnp.float32)),
        "group_sizes": (group_sizes, (groups,), (jnp.int32,)),
        "rows": (rows, (None if rows is None else rows.shape[0],), (jnp.int32,)),
    }
    for name, (array, dimensions, dtypes) in wanted.items():
        if array is not None and (array.shape != dimensions or array.dtype not in dtypes):
            kinds = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
            raise ValueError(
                f"{op}: expected {name} {list(dimensions)} in {kinds} for {groups} matrices of {shape}, "
                f"given {list(array.shape)} in {array.dtype}"
            )
