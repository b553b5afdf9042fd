"""Weights in NF4: dequantise, and multiply by a matrix that stays packed.

Implementations of the dequantisation, in order of preference; all are equal to bitsandbytes' to the bit, which decodes
to the dtype that a checkpoint names and casts to the one that is computed in:

- ``mosaic``: Hopper;
- ``triton``: NVIDIA GPUs of compute capability 8.0 or more;
- ``xla``: everything else, and what the kernels leave out: bitsandbytes' order, partial blocks, other maps.

The product decodes by one of them and multiplies then, or, with few rows on Hopper, by ``fused``: kernels that decode
as they multiply, so that nothing decoded passes through memory.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels import dispatch
from pallas_kernels.nf4 import config, xla
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES, NF4_VALUES, ORDERS, num_blocks, num_bytes


def dequantize(
    codes: UInt8[Array, "..."],
    absmax: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    dtype: DTypeLike,
    order: str = "split",
    quant_map: Float[Array, " 16"] | None = None,
    weight_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "out in"]:
    """Decode a matrix: quant_map[code] · absmax in float32, rounded to `weight_dtype` and then to `dtype`.

    A checkpoint names the dtype that its weights decode to; bitsandbytes decodes to that, whatever it computes in, and
    casts after.

    The codes stand for a frozen weight: no gradient flows to `absmax` or `quant_map`.

    Args:
        codes: uint8, flat or in any shape, for example [out, in/2]; ceil(out·in / 2) bytes, or 32 a block.
        absmax: float32, one a block of 64 elements, flat or in any shape, for example [out, in/64].
        shape: (out, in) of the matrix; blocks run over its rows.
        dtype: bfloat16, float16 or float32.
        order: of the codes, "split" or "bitsandbytes" (`codebook` describes both).
        quant_map: the sixteen values, float32; None for NF4's own. Another one goes to XLA.
        weight_dtype: bfloat16, float16 or float32; None for float32, which leaves one rounding.
        implementation: None, "mosaic", "triton" or "xla".

    Returns:
        The matrix.

    Raises:
        ValueError: codes, absmax, dtype or order that do not fit.
        NotImplementedError: the implementation that was asked for cannot serve this call; the message says why.
    """
    _check("nf4.dequantize", codes, absmax, shape, order, quant_map)
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"nf4.dequantize: dtype must be bfloat16, float16 or float32, got {jnp.dtype(dtype)}")
    through = _through("nf4.dequantize", weight_dtype, dtype)
    codes, absmax = lax.stop_gradient((codes, absmax))
    if quant_map is not None:
        quant_map = None if _is_nf4(quant_map) else lax.stop_gradient(quant_map)
    # float32 holds all that 16 bits do: there the kernel's result is rounded, and widening it is exact.
    own = _kernel_dtype(dtype, through)
    chosen = dispatch.select("nf4.dequantize", implementation, _candidates(shape, own, order, quant_map))
    if chosen == "xla":
        return xla.dequantize(
            codes, absmax, shape=shape, dtype=dtype, order=order, quant_map=quant_map, through=through
        )
    through = None if own == through else through
    blocks = num_blocks(shape)
    codes, absmax = codes.reshape(blocks, BLOCK_BYTES), absmax.reshape(blocks)
    if chosen == "triton":
        from pallas_kernels.nf4 import triton

        decoded = triton.dequantize(codes, absmax, dtype=own, config=config.triton_config(own), through=through)
    else:
        from pallas_kernels.nf4 import mosaic_sm90

        decoded = mosaic_sm90.dequantize(codes, absmax, dtype=own, config=config.mosaic_config(own), through=through)
    return decoded.reshape(shape).astype(dtype)


def matmul(
    x: Float[Array, "*rows in"],
    codes: UInt8[Array, "..."],
    absmax: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    order: str = "split",
    quant_map: Float[Array, " 16"] | None = None,
    weight_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows out"]:
    """Multiply by a packed matrix decoded to x's dtype, y = x Wᵀ; in the backward pass decode it again.

    Products are accumulated in float32; float32 inputs are multiplied in float32 ("highest" precision). Differentiable
    in x alone. The backward pass keeps the packed weight, never the decoded one, and decodes only once the gradient
    that it is multiplied with is there.

    Args:
        x: rows of `in` features in bfloat16, float16 or float32.
        codes: as in `dequantize`.
        absmax: as in `dequantize`.
        shape: (out, in) of the matrix.
        order: of the codes.
        quant_map: as in `dequantize`.
        weight_dtype: as in `dequantize`, before x's dtype.
        implementation: "fused", or one of the dequantisation's; in both passes. None lets each pass choose.

    Returns:
        The product in x's dtype.

    Raises:
        ValueError: x, codes, absmax, dtype or order that do not fit.
        NotImplementedError: the implementation that was asked for cannot serve this call; the message says why.
    """
    _check("nf4.matmul", codes, absmax, shape, order, quant_map)
    if x.shape[-1:] != shape[1:] or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"nf4.matmul: x must be [..., {shape[1]}] in bfloat16, float16 or float32 for a weight of shape {shape}, "
            f"got {x.dtype}{x.shape}"
        )
    if quant_map is not None and _is_nf4(quant_map):
        quant_map = None
    through = _through("nf4.matmul", weight_dtype, x.dtype)
    return _matmul(x, codes, absmax, quant_map, shape, order, through, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _matmul(x, codes, absmax, quant_map, shape, order, through, implementation):
    return _multiply(x, codes, absmax, quant_map, shape, order, through, implementation, gradient=False)


def _matmul_forward(x, codes, absmax, quant_map, shape, order, through, implementation):
    return _matmul(x, codes, absmax, quant_map, shape, order, through, implementation), (codes, absmax, quant_map)


def _matmul_backward(shape, order, through, implementation, packed, dy):
    codes, absmax, quant_map = packed
    dx = _multiply(dy, codes, absmax, quant_map, shape, order, through, implementation, gradient=True)
    return dx, None, None, None


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _multiply(x, codes, absmax, quant_map, shape, order, through, implementation, *, gradient: bool):
    """X Wᵀ, or x W for the gradient."""
    rows = math.prod(x.shape[:-1])
    reason = _not_fused(rows, x.dtype, shape, order, quant_map, gradient, forced=implementation == "fused")
    others = _candidates(shape, _kernel_dtype(x.dtype, through), order, quant_map)
    chosen = dispatch.select("nf4.matmul", implementation, [("fused", reason), *others])
    if chosen != "fused":
        x, weight = _decode_when_needed(x, codes, absmax, quant_map, shape, order, through, chosen)
        return _product(x, weight, contract_rows_of_weight=gradient)
    from pallas_kernels.nf4 import mosaic_sm90

    out, columns = shape
    matrix = x.reshape(rows, x.shape[-1]), codes.reshape(out, columns // 2), absmax.reshape(out, columns // BLOCK)
    cores = dispatch.target().num_cores or mosaic_sm90.CORES
    sizes = config.product_config(rows, shape, gradient, cores)
    if isinstance(sizes, config.FewTokensConfig):
        found = mosaic_sm90.few_tokens(*matrix, config=sizes, through=through)
    else:
        kernel = mosaic_sm90.fused if isinstance(sizes, config.FusedConfig) else mosaic_sm90.in_registers
        found = kernel(*matrix, gradient=gradient, config=sizes, cores=cores, through=through)
    return found.reshape(*x.shape[:-1], found.shape[-1])


def _decode_when_needed(x, codes, absmax, quant_map, shape, order, through, implementation):
    """Decode the matrix to x's dtype, but no earlier than x is there; returns x and the matrix.

    If it depended on the packed weight alone, the compiler could decode all layers' matrices at the start (XLA does, in
    one fusion), and would see that the forward and the backward pass decode the same bytes and keep the result between
    them. So one of the decode's operands is made to depend on x: the scales, the small one. A barrier on the codes
    would cost a copy of them where they are a slice of stacked layers, which XLA otherwise decodes where it lies.
    """
    absmax, x = lax.optimization_barrier((absmax, x))
    weight = dequantize(
        codes,
        absmax,
        shape=shape,
        dtype=x.dtype,
        order=order,
        quant_map=quant_map,
        weight_dtype=through,
        implementation=implementation,
    )
    # XLA must not fuse a decode of its own into the product: that GEMM is several times slower than the two in turn.
    return x, lax.optimization_barrier(weight)


def _product(x, weight, *, contract_rows_of_weight: bool):
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((x.ndim - 1,), (0 if contract_rows_of_weight else 1,)), ((), ()))
    # No preferred_element_type: 16-bit products are accumulated in float32 anyway, and when it is asked for a float32
    # result XLA writes one and converts it in a second kernel.
    return lax.dot_general(x, weight, dims, precision=precision)


def _candidates(shape, dtype, order, quant_map) -> list[tuple[str, str | None]]:
    """The implementations in order of preference, each with the reason why it cannot serve the call, or None."""
    target = dispatch.target()
    blocks, least = num_blocks(shape), config.mosaic_config(dtype).blocks
    capability = target.compute_capability if target.platform == "cuda" else None
    if capability is None:
        mosaic = triton = f"it runs on NVIDIA GPUs of a known compute capability, the target is {target}"
    elif order != "split":
        mosaic = triton = f"it reads codes in the split order, these are in {order!r} order"
    elif shape[0] * shape[1] % BLOCK:
        mosaic = triton = f"it decodes whole blocks of {BLOCK} elements, {shape[0]}×{shape[1]} ends in a partial one"
    elif quant_map is not None:
        mosaic = triton = "it decodes NF4's own values, the quant_map differs from them or is not known while tracing"
    else:
        mosaic = triton = None
        if capability != (9, 0):
            mosaic = f"it needs compute capability 9.0, the target is {target}"
        elif blocks < least:
            mosaic = f"it needs at least {least} blocks of {BLOCK} elements, {shape[0]}×{shape[1]} has {blocks}"
        if capability < (8, 0):
            triton = f"it needs compute capability 8.0 or more, the target is {target}"
    return [("mosaic", mosaic), ("triton", triton), ("xla", None)]


def _not_fused(rows: int, dtype, shape, order: str, quant_map, gradient: bool, *, forced: bool) -> str | None:
    """Why a product cannot decode as it multiplies, or should not; None where it can."""
    target = dispatch.target()
    if target.platform != "cuda" or target.compute_capability != (9, 0):
        return f"it needs an NVIDIA GPU of compute capability 9.0, the target is {target}"
    if order != "split":
        return f"it reads codes in the split order, these are in {order!r} order"
    if quant_map is not None:
        return "it decodes NF4's own values, the quant_map differs from them or is not known while tracing"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, x is {dtype}"
    if any(size % BLOCK or size < 2 * BLOCK for size in shape):
        return (
            f"it takes weights whose sides are multiples of {BLOCK} from {2 * BLOCK} on, this is {shape[0]}×{shape[1]}"
        )
    if rows == 0:
        return "x has no rows"
    if rows > (most := config.most_rows(shape, gradient)) and not forced:
        return f"with more than {most} rows it is faster to decode first, x has {rows}"
    return None


def _through(op: str, weight_dtype, dtype) -> str | None:
    """The dtype that values are rounded to before `dtype`, where that is another rounding."""
    if weight_dtype is None:
        return None
    name = jnp.dtype(weight_dtype).name
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{op}: weight_dtype must be bfloat16, float16 or float32, got {name}")
    return None if name in ("float32", jnp.dtype(dtype).name) else name


def _kernel_dtype(dtype, through: str | None):
    """What a kernel decodes to."""
    return through if through is not None and jnp.dtype(dtype) == jnp.float32 else dtype


def _is_nf4(quant_map) -> bool:
    """Whether a map is known while tracing to be NF4's own."""
    return not isinstance(quant_map, Tracer) and np.array_equal(quant_map, NF4_VALUES)


def _check(op: str, codes, absmax, shape, order: str, quant_map) -> None:
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"{op}: shape must be (out, in), both at least 1, got {shape}")
    if order not in ORDERS:
        raise ValueError(f"{op}: order must be one of {ORDERS}, got {order!r}")
    blocks, packed = num_blocks(shape), num_bytes(shape)
    sizes = {blocks * BLOCK_BYTES} | ({packed} if order == "bitsandbytes" else set())
    if codes.dtype != jnp.uint8 or math.prod(codes.shape) not in sizes:
        expected = " or ".join(str(size) for size in sorted(sizes))
        raise ValueError(
            f"{op}: codes of a {shape[0]}×{shape[1]} matrix must be {expected} uint8 in {order!r} order, "
            f"got {codes.dtype}{codes.shape}"
        )
    if absmax.dtype != jnp.float32 or math.prod(absmax.shape) != blocks:
        raise ValueError(
            f"{op}: absmax of a {shape[0]}×{shape[1]} matrix must be {blocks} float32, one for each {BLOCK} elements, "
            f"got {absmax.dtype}{absmax.shape} (decode nested scales with dequantize_absmax first)"
        )
    if quant_map is not None and (quant_map.dtype != jnp.float32 or quant_map.shape != (16,)):
        raise ValueError(f"{op}: quant_map must be float32[16], got {quant_map.dtype}{quant_map.shape}")
