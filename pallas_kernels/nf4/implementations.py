"""The implementations of NF4's operations by name, in order of preference.

Dequantisation is one function, which the matrix product uses before it multiplies:

    forward(codes, absmax, quant_map, *, shape, dtype, order, through) -> matrix [out, in]

The product has two, itself and its gradient in x:

    forward(x, codes, absmax, quant_map, *, shape, order, through, dtype) -> x Wᵀ
    backward(dy, codes, absmax, quant_map, *, shape, order, through, dtype) -> dy W

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

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.dispatch import HALF, Implementation, Registry, Target, num_cores
from pallas_kernels.nf4 import config, mosaic_sm90, products, triton, triton_float8, triton_scales, xla
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES, num_blocks
from pallas_kernels.shard_gather import Shared, whole, why_not_peers
from pallas_kernels.transformations import known


def _why_not_any_kernel(device: Target, shape: tuple[int, int], order: str, own_map: bool, **facts) -> str | None:
    if device.platform != "cuda" or device.compute_capability is None:
        return f"it runs on NVIDIA GPUs of a known compute capability, the target is {device}"
    out, columns = shape
    if out * columns % BLOCK:
        return f"it decodes whole blocks of {BLOCK} elements, {out}×{columns} ends in a partial one"
    return _why_not_packed_so(order, own_map)


def _why_not_packed_so(order: str, own_map: bool) -> str | None:
    if order != "split":
        return f"it reads codes in the split order, these are in {order!r} order"
    if not own_map:
        return "it decodes NF4's own values, the quant_map differs from them or is not known while tracing"
    return None


def _why_not_tiles(
    sizes: Callable[[DTypeLike], int],
    device: Target,
    shape: tuple[int, int],
    dtype: DTypeLike,
    through: str | None,
    **facts,
) -> str | None:
    """Why a kernel with tiles of these sizes does not decode a matrix."""
    if reason := _why_not_any_kernel(device, shape, **facts):
        return reason
    blocks, least = num_blocks(shape), sizes(_kernel_dtype(dtype, through))
    if blocks < least:
        return f"it needs at least {least} blocks of {BLOCK} elements, {shape[0]}×{shape[1]} has {blocks}"
    return None


def _why_not_fused(
    device: Target, shape: tuple[int, int], order: str, own_map: bool, rows: int, gradient: bool, **facts
) -> str | None:
    if reason := _why_not_packed_so(order, own_map):
        return reason
    out, columns = shape
    if any(size % BLOCK or size < 2 * BLOCK for size in shape):
        return f"it takes weights whose sides are multiples of {BLOCK} from {2 * BLOCK} on, this is {out}×{columns}"
    if rows == 0:
        return "x has no rows"
    if config.product_config(int(known(rows, 1)), shape, gradient, num_cores()) is None:
        what = "x W" if gradient else "x Wᵀ"
        return f"no kernel takes {what} of {rows} rows with {out}×{columns} (`nf4.config.product_config`)"
    return None


def _product_preference(device: Target, rows: int, gradient: bool, **facts) -> tuple[str, ...]:
    """Few rows decode inside the product; with more rows it is faster to decode first, and "fused" must be forced."""
    others = tuple(DEQUANTIZE.implementations)
    few = known(rows, math.inf) <= config.most_rows(gradient)
    return ("fused", *others) if few else (*others, "fused")


def _kernel_dtype(dtype: DTypeLike, through: str | None) -> DTypeLike:
    """The dtype of a kernel's result: float32 holds all 16-bit values, so its result is widened, which is exact."""
    return through if through is not None and jnp.dtype(dtype) == jnp.float32 else dtype


def _of_blocks(
    decode: Callable[..., Array],
    sizes: Callable[[DTypeLike], int],
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
        absmax, options = absmax.reshape(blocks), {"dtype": own, "tile": sizes(own), "through": through}
        if in_place is not None and isinstance(codes, Shared) and _reads_shards(codes, options["tile"]):
            stack = codes.stack.reshape(len(codes.stack), -1, BLOCK_BYTES)
            decoded = in_place(dataclasses.replace(codes, stack=stack), absmax, **options)
        else:
            decoded = decode(whole(codes).reshape(blocks, BLOCK_BYTES), absmax, **options)
        return decoded.reshape(shape).astype(dtype)

    return dequantize


def _reads_shards(codes: Shared, tile: int) -> bool:
    """Whether a kernel can decode codes in other devices' memory: a device's share is a tile or more."""
    enough = math.prod(codes.stack.shape[1:]) >= tile * BLOCK_BYTES
    return enough and why_not_peers(dispatch.target()) is None


DEQUANTIZE = Registry(
    "nf4.dequantize",
    {
        "mosaic": Implementation(
            _of_blocks(mosaic_sm90.dequantize, config.mosaic_blocks, in_place=mosaic_sm90.dequantize_shared),
            capability=(9, 0),
            exactly=True,
            why_not=functools.partial(_why_not_tiles, config.mosaic_blocks),
        ),
        "triton": Implementation(
            _of_blocks(triton.dequantize, config.triton_blocks),
            capability=(8, 0),
            why_not=functools.partial(_why_not_tiles, config.triton_blocks),
        ),
        "xla": Implementation(xla.dequantize),
    },
)

#: Of a dequantisation to float8_e4m3fn, for the tests of the others.
_FLOAT8 = {"dtype": jnp.float8_e4m3fn, "through": None, "order": "split"}


def _why_not_mosaic_float8(device: Target, shape: tuple[int, int], transposed: bool) -> str | None:
    out, columns = shape
    if not transposed:
        return DEQUANTIZE["mosaic"].reason(device, shape=shape, own_map=True, **_FLOAT8)
    if reason := _why_not_any_kernel(device, shape, "split", True):
        return reason
    least = mosaic_sm90.ROWS, mosaic_sm90.COLUMNS
    if out % 4 or out < least[0] or columns < least[1]:
        return f"it transposes a multiple of 4 rows, {least[0]}×{least[1]} or more, this is {out}×{columns}"
    return None


def _why_not_triton_float8(device: Target, shape: tuple[int, int], transposed: bool) -> str | None:
    if reason := DEQUANTIZE["triton"].reason(device, shape=shape, own_map=True, **_FLOAT8):
        return reason
    out, columns = shape
    if transposed and config.transposed_rows(out) is None:
        return f"it transposes whole tiles of {config.TRANSPOSED_ROWS[-1]} rows or more, this is {out}×{columns}"
    return None


def _mosaic_transposed(codes: Array, absmax: Array, *, shape: tuple[int, int]) -> tuple[Array, Array]:
    absmax, largest = triton_scales.transpose_and_largest(absmax)
    return mosaic_sm90.dequantize_transposed(codes.reshape(shape[0], shape[1] // 2), absmax, largest)


def _triton_transposed(codes: Array, absmax: Array, *, shape: tuple[int, int]) -> tuple[Array, Array]:
    rows = config.transposed_rows(shape[0])
    assert rows is not None
    absmax, largest = triton_scales.transpose_and_largest(absmax)
    scales, inverse = triton_scales.scales_of(jnp.max(largest, axis=1))
    scaled = absmax * inverse[:, None]
    return triton_float8.dequantize_transposed(codes, scaled, shape=shape, rows=rows), jnp.repeat(scales, BLOCK)


def _in_float8(decode: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """A kernel's dequantisation to any dtype, to float8_e4m3fn."""

    def dequantize(codes, absmax, *, shape):
        scaled, scales = triton_scales.scale_rows(absmax)
        return decode(codes, scaled, None, shape=shape, **_FLOAT8), scales

    return dequantize


def _xla_float8(codes: Array, absmax: Array, *, shape: tuple[int, int], transposed: bool) -> tuple[Array, Array]:
    scales, inverse = triton_scales.scales_of(jnp.max(triton_scales.bits_of(absmax), axis=0 if transposed else 1))
    scaled = absmax * (inverse[None, :] if transposed else inverse[:, None])
    matrix = xla.dequantize(codes, scaled, None, shape=shape, **_FLOAT8)
    return (matrix.T, jnp.repeat(scales, BLOCK)) if transposed else (matrix, scales)


FLOAT8 = Registry(
    "nf4.dequantize_float8",
    {
        "mosaic": Implementation(
            _in_float8(DEQUANTIZE["mosaic"].forward),
            _mosaic_transposed,
            capability=(9, 0),
            exactly=True,
            why_not=_why_not_mosaic_float8,
        ),
        "triton": Implementation(
            _in_float8(DEQUANTIZE["triton"].forward),
            _triton_transposed,
            capability=(8, 9),
            why_not=_why_not_triton_float8,
        ),
        "xla": Implementation(
            functools.partial(_xla_float8, transposed=False), functools.partial(_xla_float8, transposed=True)
        ),
    },
)


def _both_ways(multiply: Callable[..., Array], implementation: Implementation) -> Implementation:
    """A product and its gradient by a function that takes `gradient`, where an implementation serves."""
    forward, backward = (functools.partial(multiply, gradient=gradient) for gradient in (False, True))
    return implementation._replace(forward=forward, backward=backward)


_FUSED = Implementation(products.fused, capability=(9, 0), exactly=True, dtypes=HALF, why_not=_why_not_fused)
MATMUL = Registry(
    "nf4.matmul",
    {
        "fused": _both_ways(products.fused, _FUSED),
        **{
            name: _both_ways(functools.partial(products.decode_first, decode.forward), decode)
            for name, decode in DEQUANTIZE.implementations.items()
        },
    },
    _product_preference,
)
