"""The implementations of NF4's operations by name, in order of preference.

Dequantisation is one function, which the matrix product uses before it multiplies:

    forward(codes, absmax, quant_map, *, shape, dtype, order, through) -> matrix [out, in]

The product has two, itself and its gradient in x:

    forward(x, codes, absmax, quant_map, *, shape, order, through) -> x Wᵀ
    backward(dy, codes, absmax, quant_map, *, shape, order, through) -> dy W

The dequantisation to float8_e4m3fn has two, to the matrix and to its transpose, over the scales of the result's rows:

    forward(codes, absmax [out, in/64], *, shape) -> matrix [out, in], scales [out]
    backward(codes, absmax [out, in/64], *, shape) -> matrix [in, out], scales [in]

``quant_map`` is None for NF4's own. ``through`` is the dtype that values are rounded to before the result's; None for
none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Registry, Target
from pallas_kernels.nf4 import config, mosaic_sm90, products, triton, triton_float8, triton_scales, xla
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES, num_blocks
from pallas_kernels.shard_gather import Shared, whole, why_not_peers
from pallas_kernels.transformations import known


class Decode(NamedTuple):
    """A dequantisation and its device.

    Attributes:
        target: the device.
        shape: (out, in) of the matrix.
        dtype: of the result.
        through: dtype that values are rounded to before; None for none.
        order: of the codes.
        own_map: whether the values are known to be NF4's own.
    """

    target: Target
    shape: tuple[int, int]
    dtype: DTypeLike
    through: str | None
    order: str
    own_map: bool


class Product(NamedTuple):
    """A matrix product and its device.

    Attributes:
        weight: the matrix, decoded to x's dtype.
        rows: of x.
        gradient: x W instead of x Wᵀ.
    """

    weight: Decode
    rows: int
    gradient: bool


class Float8(NamedTuple):
    """A dequantisation to float8_e4m3fn.

    Attributes:
        weight: the matrix.
        transposed: whether its transpose is wanted.
    """

    weight: Decode
    transposed: bool


def _why_not_any_kernel(case: Decode) -> str | None:
    if case.target.platform != "cuda" or case.target.compute_capability is None:
        return f"it runs on NVIDIA GPUs of a known compute capability, the target is {case.target}"
    if case.order != "split":
        return f"it reads codes in the split order, these are in {case.order!r} order"
    out, columns = case.shape
    if out * columns % BLOCK:
        return f"it decodes whole blocks of {BLOCK} elements, {out}×{columns} ends in a partial one"
    if not case.own_map:
        return "it decodes NF4's own values, the quant_map differs from them or is not known while tracing"
    return None


def _why_not_mosaic(case: Decode) -> str | None:
    reason = _why_not_any_kernel(case) or case.target.lacks((9, 0), exactly=True)
    return reason or _too_few_blocks(case, config.mosaic_config)


def _too_few_blocks(case: Decode, sizes: Callable[[DTypeLike], Any]) -> str | None:
    """Whether a matrix is less than a kernel's tile."""
    blocks, least = num_blocks(case.shape), sizes(_kernel_dtype(case.dtype, case.through)).blocks
    if blocks < least:
        return f"it needs at least {least} blocks of {BLOCK} elements, {case.shape[0]}×{case.shape[1]} has {blocks}"
    return None


def _why_not_triton(case: Decode) -> str | None:
    return _why_not_any_kernel(case) or case.target.lacks((8, 0)) or _too_few_blocks(case, config.triton_config)


def _why_not_fused(case: Product) -> str | None:
    weight = case.weight
    if reason := weight.target.lacks((9, 0), exactly=True):
        return reason
    if weight.order != "split":
        return f"it reads codes in the split order, these are in {weight.order!r} order"
    if not weight.own_map:
        return "it decodes NF4's own values, the quant_map differs from them or is not known while tracing"
    if weight.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, x is {weight.dtype}"
    if any(size % BLOCK or size < 2 * BLOCK for size in weight.shape):
        out, columns = weight.shape
        return f"it takes weights whose sides are multiples of {BLOCK} from {2 * BLOCK} on, this is {out}×{columns}"
    if case.rows == 0:
        return "x has no rows"
    if config.product_config(known(case.rows, 1), weight.shape, case.gradient, mosaic_sm90.CORES) is None:
        out, columns = weight.shape
        what = "x W" if case.gradient else "x Wᵀ"
        return f"no kernel takes {what} of {case.rows} rows with {out}×{columns} (`nf4.config.product_config`)"
    return None


def _product_preference(case: Product) -> tuple[str, ...]:
    """Few rows decode inside the product; with more rows it is faster to decode first, and "fused" must be forced."""
    others = tuple(DEQUANTIZE.implementations)
    few = known(case.rows, math.inf) <= config.most_rows(case.gradient)
    return ("fused", *others) if few else (*others, "fused")


def _kernel_dtype(dtype: DTypeLike, through: str | None) -> DTypeLike:
    """The dtype of a kernel's result: float32 holds all 16-bit values, so its result is widened, which is exact."""
    return through if through is not None and jnp.dtype(dtype) == jnp.float32 else dtype


def _of_blocks(
    decode: Callable[..., Array],
    sizes: Callable[[DTypeLike], Any],
    in_place: Callable[..., Array] | None = None,
) -> Callable[..., Array]:
    """The dequantisation of a matrix by a kernel that decodes whole blocks.

    Args:
        decode: the kernel.
        sizes: of its tiles, by the result's dtype.
        in_place: that of codes in the memory of several devices; None: they are gathered.
    """

    def dequantize(codes, absmax, quant_map, *, shape, dtype, order, through):
        del quant_map, order
        own, blocks = _kernel_dtype(dtype, through), num_blocks(shape)
        through = None if own == through else through
        absmax, options = absmax.reshape(blocks), {"dtype": own, "config": sizes(own), "through": through}
        if in_place is not None and isinstance(codes, Shared) and _reads_shards(codes, options["config"]):
            stack = codes.stack.reshape(len(codes.stack), -1, BLOCK_BYTES)
            found = in_place(dataclasses.replace(codes, stack=stack), absmax, **options)
        else:
            found = decode(whole(codes).reshape(blocks, BLOCK_BYTES), absmax, **options)
        return found.reshape(shape).astype(dtype)

    return dequantize


def _reads_shards(codes: Shared, sizes: Any) -> bool:
    """Whether a kernel can decode codes in other devices' memory: a device's share is a tile or more."""
    enough = math.prod(codes.stack.shape[1:]) >= sizes.blocks * BLOCK_BYTES
    return enough and why_not_peers(dispatch.target()) is None


DEQUANTIZE: Registry[Decode] = Registry(
    "nf4.dequantize",
    {
        "mosaic": Implementation(
            _why_not_mosaic,
            _of_blocks(mosaic_sm90.dequantize, config.mosaic_config, in_place=mosaic_sm90.dequantize_shared),
        ),
        "triton": Implementation(_why_not_triton, _of_blocks(triton.dequantize, config.triton_config)),
        "xla": Implementation(lambda case: None, xla.dequantize),
    },
    lambda case: ("mosaic", "triton", "xla"),
)


def _why_not_mosaic_float8(case: Float8) -> str | None:
    weight, (out, columns) = case.weight, case.weight.shape
    if not case.transposed:
        return _why_not_mosaic(weight)
    if reason := _why_not_any_kernel(weight) or weight.target.lacks((9, 0), exactly=True):
        return reason
    least = mosaic_sm90.ROWS, mosaic_sm90.COLUMNS
    if out % 4 or out < least[0] or columns < least[1]:
        return f"it transposes a multiple of 4 rows, {least[0]}×{least[1]} or more, this is {out}×{columns}"
    return None


def _why_not_triton_float8(case: Float8) -> str | None:
    if reason := _why_not_triton(case.weight) or case.weight.target.lacks((8, 9)):
        return reason
    out, columns = case.weight.shape
    if case.transposed and config.transposed_config(out) is None:
        return f"it transposes whole tiles of {config.TRANSPOSED_ROWS[-1]} rows or more, this is {out}×{columns}"
    return None


def _mosaic_transposed(codes: Array, absmax: Array, *, shape: tuple[int, int]) -> tuple[Array, Array]:
    absmax, largest = triton_scales.transpose_and_largest(absmax, config=config.parts_config(shape[0]))
    return mosaic_sm90.dequantize_transposed(codes.reshape(shape[0], shape[1] // 2), absmax, largest)


def _triton_transposed(codes: Array, absmax: Array, *, shape: tuple[int, int]) -> tuple[Array, Array]:
    sizes = config.transposed_config(shape[0])
    assert sizes is not None
    absmax, largest = triton_scales.transpose_and_largest(absmax, config=config.parts_config(shape[0]))
    scales, inverse = triton_scales.scales_of(jnp.max(largest, axis=1))
    scaled = absmax * inverse[:, None]
    return triton_float8.dequantize_transposed(codes, scaled, shape=shape, config=sizes), jnp.repeat(scales, BLOCK)


def _in_float8(decode: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """A kernel's dequantisation to any dtype, to float8_e4m3fn."""

    def dequantize(codes, absmax, *, shape):
        scaled, scales = triton_scales.scale_rows(absmax, config=config.scale_rows_config(absmax.shape[1]))
        return decode(codes, scaled, None, **_float8_options(shape)), scales

    return dequantize


def _xla_float8(codes: Array, absmax: Array, *, shape: tuple[int, int], transposed: bool) -> tuple[Array, Array]:
    scales, inverse = triton_scales.scales_of(jnp.max(triton_scales.bits_of(absmax), axis=0 if transposed else 1))
    scaled = absmax * (inverse[None, :] if transposed else inverse[:, None])
    matrix = xla.dequantize(codes, scaled, None, **_float8_options(shape))
    return (matrix.T, jnp.repeat(scales, BLOCK)) if transposed else (matrix, scales)


def _float8_options(shape: tuple[int, int]) -> dict[str, Any]:
    return {"shape": shape, "dtype": jnp.float8_e4m3fn, "order": "split", "through": None}


FLOAT8: Registry[Float8] = Registry(
    "nf4.dequantize_float8",
    {
        "mosaic": Implementation(_why_not_mosaic_float8, _in_float8(DEQUANTIZE["mosaic"].forward), _mosaic_transposed),
        "triton": Implementation(_why_not_triton_float8, _in_float8(DEQUANTIZE["triton"].forward), _triton_transposed),
        "xla": Implementation(
            lambda case: None,
            functools.partial(_xla_float8, transposed=False),
            functools.partial(_xla_float8, transposed=True),
        ),
    },
    lambda case: ("mosaic", "triton", "xla"),
)


def _decode_first(decode: Implementation) -> Implementation:
    multiply = functools.partial(products.decode_first, decode.forward)
    return Implementation(
        lambda case: decode.why_not(case.weight),
        functools.partial(multiply, gradient=False),
        functools.partial(multiply, gradient=True),
    )


MATMUL: Registry[Product] = Registry(
    "nf4.matmul",
    {
        "fused": Implementation(
            _why_not_fused,
            functools.partial(products.fused, gradient=False),
            functools.partial(products.fused, gradient=True),
        ),
        **{name: _decode_first(decode) for name, decode in DEQUANTIZE.implementations.items()},
    },
    _product_preference,
)
