"""Weights in NF4: dequantise, and multiply by a matrix that stays packed.

Implementations of the dequantisation, in order of preference; all are equal to bitsandbytes' to the bit, which decodes
to the dtype that a checkpoint names and casts to the one that is computed in:

- ``mosaic``: Hopper;
- ``triton``: NVIDIA GPUs of compute capability 8.0 or more;
- ``xla``: everything else, bitsandbytes' order, partial blocks and other maps included.

The product decodes by one of them and then multiplies, or takes ``fused``, with few rows on Hopper: kernels that decode
as they multiply, so that nothing decoded passes through memory.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.dispatch import Implementation
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES, NF4_VALUES, ORDERS, num_blocks, num_bytes
from pallas_kernels.nf4.implementations import DEQUANTIZE, FLOAT8, MATMUL
from pallas_kernels.nf4.products import fused_addends
from pallas_kernels.shard_gather import Shared, whole
from pallas_kernels.transformations import custom_vjp


def dequantize(
    codes: UInt8[Array, "..."] | Shared,
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
        codes: uint8, flat or in any shape, for example [out, in/2]; ceil(out·in / 2) bytes, or 32 a block. Rows that
            other devices share (`shard_gather.Shared`) are decoded where they lie, or gathered first.
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
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    _check("nf4.dequantize", codes, absmax, shape, order, quant_map)
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"nf4.dequantize: dtype must be bfloat16, float16 or float32, got {jnp.dtype(dtype)}")
    through = _through("nf4.dequantize", weight_dtype, dtype)
    codes, absmax = lax.stop_gradient((codes, absmax))
    if quant_map is not None:
        quant_map = None if _is_nf4(quant_map) else lax.stop_gradient(quant_map)
    options = {"shape": shape, "dtype": dtype, "order": order, "through": through}
    chosen = DEQUANTIZE.chosen(implementation, own_map=quant_map is None, **options)
    return chosen.forward(codes, absmax, quant_map, **options)


def dequantize_float8(
    codes: UInt8[Array, "..."] | Shared,
    absmax: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    transposed: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows columns"], Float[Array, " rows"]]:
    """Decode a matrix, or its transpose, to float8_e4m3fn with a scale for each row of the result.

    NF4[code] · absmax / scale in float32, rounded once. The scales are powers of two and follow from absmax alone, no
    value of a block exceeding it: a row's from the largest of its blocks, a column's from the largest of the blocks
    that it crosses, which it shares with the columns beside it. No gradient flows to `absmax`.

    Args:
        codes: as in `dequantize`, in split order.
        absmax: as in `dequantize`.
        shape: (out, in) of the matrix; in is a multiple of 64.
        transposed: whether to decode to the transpose, with the summed axis of dy·W last.
        implementation: None, "mosaic", "triton" or "xla"; bit-equal where absmax is finite.

    Returns:
        matrix: float8_e4m3fn [out, in], or [in, out].
        scales: float32 [out], or [in].

    Raises:
        ValueError: codes or absmax that do not fit; blocks that cross rows.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    _check("nf4.dequantize_float8", codes, absmax, shape, "split", None)
    out, columns = shape
    if columns % BLOCK:
        raise ValueError(f"nf4.dequantize_float8: expected rows of whole blocks of {BLOCK}, got {out}×{columns}")
    chosen = FLOAT8.chosen(implementation, shape=shape, transposed=transposed)
    codes, absmax = lax.stop_gradient((whole(codes), absmax))
    decode = chosen.backward if transposed else chosen.forward
    return decode(codes, absmax.reshape(out, columns // BLOCK), shape=shape)


def matmul(
    x: Float[Array, "*rows in"],
    codes: UInt8[Array, "..."] | Shared,
    absmax: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    order: str = "split",
    quant_map: Float[Array, " 16"] | None = None,
    weight_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
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
        dtype: of the product; None: that of x. "fused" may round to that of x before.
        implementation: "fused", or one of the dequantisation's; in both passes. None lets each pass choose.

    Returns:
        The product in `dtype`.

    Raises:
        ValueError: x, codes, absmax, dtype or order that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
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
    dtypes = x.dtype, x.dtype if dtype is None else jnp.dtype(dtype)
    if dtypes[1] not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"nf4.matmul: dtype must be bfloat16, float16 or float32, got {dtypes[1]}")
    return _matmul(x, codes, absmax, quant_map, shape, order, through, dtypes, implementation)


def addends(
    x: Float[Array, "rows in"],
    codes: UInt8[Array, "..."],
    absmax: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    order: str = "split",
    quant_map: Float[Array, " 16"] | None = None,
    weight_dtype: DTypeLike | None = None,
) -> Float[Array, "addends rows out"]:
    """`matmul` for a reader that makes the last sum: addends in float32, or one in the dtype of x. Not differentiable.

    Args:
        x: as in `matmul`, one row at least.
        codes: as there.
        absmax: as there.
        shape: as there.
        order: as there.
        quant_map: as there.
        weight_dtype: as there.
    """
    _check("nf4.addends", codes, absmax, shape, order, quant_map)
    weight = {"shape": shape, "order": order}
    through, own_map = _through("nf4.addends", weight_dtype, x.dtype), quant_map is None or _is_nf4(quant_map)
    facts = {"dtype": x.dtype, "through": through, "own_map": own_map, "rows": len(x), "gradient": False}
    if MATMUL.choose(None, **weight, **facts) == "fused":
        return fused_addends(x, codes, absmax, shape=shape, through=through, gradient=False)
    return matmul(x, codes, absmax, quant_map=quant_map, weight_dtype=weight_dtype, **weight)[None]


@custom_vjp(nondiff_argnums=(4, 5, 6, 7, 8))
def _matmul(x, codes, absmax, quant_map, shape, order, through, dtypes, implementation):
    chosen = _chosen(x, quant_map, shape, order, through, implementation, gradient=False)
    return chosen.forward(x, codes, absmax, quant_map, shape=shape, order=order, through=through, dtype=dtypes[1])


def _matmul_forward(x, codes, absmax, quant_map, *statics):
    return _matmul(x, codes, absmax, quant_map, *statics), (codes, absmax, quant_map)


def _matmul_backward(shape, order, through, dtypes, implementation, packed, dy):
    (codes, absmax, quant_map), dy = packed, dy.astype(dtypes[0])
    chosen = _chosen(dy, quant_map, shape, order, through, implementation, gradient=True)
    dx = chosen.backward(dy, codes, absmax, quant_map, shape=shape, order=order, through=through, dtype=dy.dtype)
    return dx, None, None, None


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _chosen(x, quant_map, shape, order, through, implementation, *, gradient: bool) -> Implementation:
    weight = {"shape": shape, "dtype": x.dtype, "through": through, "order": order, "own_map": quant_map is None}
    return MATMUL.chosen(implementation, rows=math.prod(x.shape[:-1]), gradient=gradient, **weight)


def _through(op: str, weight_dtype, dtype) -> str | None:
    """The dtype that values are rounded to before `dtype`; None if that changes nothing."""
    if weight_dtype is None:
        return None
    name = jnp.dtype(weight_dtype).name
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{op}: weight_dtype must be bfloat16, float16 or float32, got {name}")
    return None if name in ("float32", jnp.dtype(dtype).name) else name


def _is_nf4(quant_map) -> bool:
    """Whether a map is, known while tracing, NF4's own."""
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
