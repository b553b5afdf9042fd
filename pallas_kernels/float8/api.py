"""Products of float8_e4m3fn matrices with a scale a row of each.

    y = (x · wᵀ) · (x_scales ⊗ w_scales)

Both operands are laid out with the summed axis last, as Hopper's FP8 wgmma requires. Scales are powers of two
(`scales`), so applying them to the bfloat16 result of the product rounds nothing. That result is asked for in bfloat16:
XLA writes a float32 one and converts it in a second kernel, a quarter slower on an H200.

Implementations of the quantisation of rows, bit-equal for finite rows: ``triton`` for NVIDIA GPUs of compute capability
8.9 or more, ``xla`` for everything else.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import FLOATS, Implementation, Target, triton_or_xla
from pallas_kernels.float8 import triton
from pallas_kernels.float8.scaled import Rounded, Scaled, scaled_values
from pallas_kernels.float8.scales import scale_of


def quantize_rows(x: Float[Array, "*rows in"], *, implementation: str | None = None) -> Rounded:
    """Round each row to float8_e4m3fn by a scale of its own: x ≈ codes · scales.

    Args:
        x: bfloat16, float16 or float32. A row with infinity gets an infinite scale, NaN stays NaN.
        implementation: None, "triton" or "xla".

    Returns:
        codes: float8_e4m3fn, x / scale rounded to nearest even.
        scales: float32, the smallest power of two that brings the row's absolute maximum to 448 or below.

    Raises:
        ValueError: x of another dtype or without an axis.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    if x.ndim < 1 or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"float8.quantize_rows: x must be [..., in] in bfloat16, float16 or float32, got {x.dtype}{x.shape}"
        )
    rows = x.reshape(-1, x.shape[-1])
    chosen = QUANTIZE.chosen(implementation, columns=rows.shape[1], dtype=x.dtype)
    return Rounded(*chosen.forward(rows)).over(*x.shape[:-1])


def _why_not_triton(_: Target, columns: int, **facts) -> str | None:
    return triton.too_wide(columns, triton.MOST_COLUMNS)


def _by_xla(x: Float[Array, "N in"]) -> tuple[Float[Array, "N in"], Float[Array, " N"]]:
    """On a GPU a reduction and an element-wise loop, which reads x again."""
    scale, inverse = scale_of(jnp.max(jnp.abs(x), axis=1).astype(jnp.float32))
    return (x.astype(jnp.float32) * inverse[:, None]).astype(jnp.float8_e4m3fn), scale


#: forward(x) -> (codes [N, in], scales [N])
QUANTIZE = triton_or_xla(
    "float8.quantize_rows",
    Implementation(triton.quantize_rows, capability=(8, 9), dtypes=FLOATS, why_not=_why_not_triton),
    Implementation(_by_xla),
)


def quantize_columns(w: Float[Array, "out in"]) -> tuple[Float[Array, "in out"], Float[Array, " in"]]:
    """`quantize_rows` of the transpose of a matrix: a reduction, and a loop that rounds and transposes.

    Args:
        w: bfloat16, float16 or float32.
    """
    scales, inverse = scale_of(jnp.max(jnp.abs(w), axis=0, initial=0).astype(jnp.float32))
    return (w.astype(jnp.float32) * inverse[None, :]).astype(jnp.float8_e4m3fn).T, scales


def matmul(
    x: Float[Array, "*rows in"],
    x_scales: Float[Array, "*rows"],
    w: Float[Array, "out in"],
    w_scales: Float[Array, " out"],
    *,
    promoted: bool = False,
) -> Float[Array, "*rows out"]:
    """The product x·wᵀ of scaled codes, in bfloat16.

    Args:
        x: float8_e4m3fn.
        x_scales: float32, powers of two.
        w: float8_e4m3fn.
        w_scales: float32, powers of two; or others, at the cost of a second rounding.
        promoted: whether partial sums are promoted to float32 as they go. Hopper's tensor cores add up FP8 products in
            fewer bits.

    Returns:
        bfloat16.

    Raises:
        ValueError: dtypes or shapes that do not fit.
    """
    return scaled_values(matmul_scaled(x, x_scales, w, w_scales, promoted=promoted)).astype(jnp.bfloat16)


def matmul_scaled(
    x: Float[Array, "*rows in"],
    x_scales: Float[Array, "*rows"],
    w: Float[Array, "out in"],
    w_scales: Float[Array, " out"],
    *,
    promoted: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
) -> Scaled:
    """`matmul` whose scales are left to the reader: the codes' product in `dtype` with them.

    Raises:
        ValueError: dtypes or shapes that do not fit.
    """
    fits = x.shape[-1:] == w.shape[1:] and x_scales.shape == x.shape[:-1] and w_scales.shape == w.shape[:1]
    if x.dtype != jnp.float8_e4m3fn or w.dtype != jnp.float8_e4m3fn or not fits:
        raise ValueError(
            "float8.matmul: expected x [..., in] and w [out, in] in float8_e4m3fn with scales [...] and [out], got "
            f"{x.dtype}{x.shape}, {w.dtype}{w.shape}, {x_scales.shape} and {w_scales.shape}"
        )
    # XLA gives cuBLASLt its fast accumulation at the default precision alone.
    precision = lax.Precision.HIGHEST if promoted else None
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    product = lax.dot_general(x, w, dims, precision=precision, preferred_element_type=dtype)
    return Scaled(product, x_scales, w_scales)
