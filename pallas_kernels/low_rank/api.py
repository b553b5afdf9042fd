"""Sums of a large product and a low-rank one (arXiv 2106.09685), each in one pass over the large arrays.

    y = residual + base + products·Bᵀ                 base = x·Wᵀ, products = x·Aᵀ
    dproducts = dy·B        dB = dyᵀ·products         one pass over dy
    dx = dy·W + dproducts·A        dA = dproductsᵀ·x  one pass over dy·W and x
    dproducts = dy·B        codes ⊗ scales ≈ dy        one pass over dy, whose rows' absmax is known

The large products are made elsewhere. Several projections of one input are one array whose parts lie side by side, each
with rows of B and columns of the products of its own.

Implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, 16-bit activations (8.9 with float8);
- ``xla``: everything else.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import HALF, Implementation, Target, triton_or_xla
from pallas_kernels.float8.scaled import Rounded, Scaled, product_of
from pallas_kernels.low_rank import config, triton, xla
from pallas_kernels.tiles import RANKS
from pallas_kernels.transformations import with_automatic_axes


def low_rank_add(
    base: Float[Array, "N F"] | Scaled,
    products: Float[Array, "N PR"],
    lora_B: Float[Array, "F R"],
    *,
    parts: tuple[int, ...],
    residual: Float[Array, "N F"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "N F"]:
    """The sum residual + base + products·Bᵀ in the dtype of `products`.

    Args:
        base: x·Wᵀ, in that dtype or in float32; of a product in float8 its scales may be left to this.
        products: x·Aᵀ of each part, side by side.
        lora_B: with the adapters' scale.
        parts: columns of each part; they add up to F.
        residual: one more addend.
        implementation: None, "triton" or "xla".

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    large = product_of(base)
    _check_parts("low_rank_add", large, lora_B, parts)
    facts = _checked("low_rank_add", large.shape[0], products, lora_B, parts)
    if large.dtype not in (products.dtype, jnp.float32):
        raise ValueError(f"low_rank_add: base must be in {products.dtype} like products or float32, got {large.dtype}")
    if residual is not None and (residual.shape, residual.dtype) != (large.shape, products.dtype):
        expected, given = f"{products.dtype}{list(large.shape)}", f"{residual.dtype}{list(residual.shape)}"
        raise ValueError(f"low_rank_add: residual must be {expected}, got {given}")
    return ADD.chosen(implementation, **facts).forward(residual, base, products, lora_B, parts)


def low_rank_output_gradients(
    dy: Float[Array, "N F"],
    products: Float[Array, "N PR"],
    lora_B: Float[Array, "F R"],
    *,
    parts: tuple[int, ...],
    absmax: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "N PR"], Float[Array, "F R"], Rounded | None]:
    """The gradients of the products and of B from that of their sum; and this in float8.

    Args:
        dy: the gradient of the sum.
        products: as in `low_rank_add`.
        lora_B: as in `low_rank_add`.
        parts: as in `low_rank_add`.
        absmax: float32, the largest magnitude in each row of dy; None: it is not wanted in float8.
        implementation: None, "triton" or "xla".

    Returns:
        The gradient of `products` in the dtype of dy; that of `lora_B`, float32; dy as `float8.quantize_rows` makes it,
        or None.

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    _check_parts("low_rank_output_gradients", dy, lora_B, parts)
    _check_dtypes("low_rank_output_gradients", dy, products)
    facts = _checked("low_rank_output_gradients", dy.shape[0], products, lora_B, parts)
    if absmax is not None:
        _check_absmax("low_rank_output_gradients", dy, absmax)
    forward = OUTPUT.chosen(implementation, **facts, float8=absmax is not None).forward
    return with_automatic_axes(
        lambda dy, products, lora_B, absmax: forward(dy, products, lora_B, parts, absmax),
        *(dy, products, lora_B, absmax),
        rows_like=(dy, None, dy),
    )


def low_rank_round_rows(
    dy: Float[Array, "N F"],
    absmax: Float[Array, " N"],
    lora_B: Float[Array, "F R"],
    *,
    parts: tuple[int, ...],
    implementation: str | None = None,
) -> tuple[Float[Array, "N PR"], Rounded]:
    """The gradient of the products from that of their sum, and this in float8 as `float8.quantize_rows` makes it.

    Args:
        dy: the gradient of the sum.
        absmax: float32, the largest magnitude in each of its rows.
        lora_B: as in `low_rank_add`.
        parts: as in `low_rank_add`.
        implementation: None, "triton" or "xla".

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    op = "low_rank_round_rows"
    _check_parts(op, dy, lora_B, parts)
    _check_absmax(op, dy, absmax)
    _check_dtypes(op, dy, lora_B)
    facts = {"rows": dy.shape[0], "parts": parts, "dtype": dy.dtype, "rank": lora_B.shape[-1]}
    return ROUND.chosen(implementation, **facts, float8=True).forward(dy, absmax, lora_B, parts)


def low_rank_input_gradients(
    dx: Float[Array, "N E"],
    x: Float[Array, "N E"],
    dproducts: Float[Array, "N R"],
    lora_A: Float[Array, "R E"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "N E"], Float[Array, "R E"]]:
    """The gradient of x through both products, and that of A.

    Args:
        dx: the gradient through the large product.
        x: the input.
        dproducts: the gradient of x·Aᵀ.
        lora_A: A of all parts, one below the other.
        implementation: None, "triton" or "xla".

    Returns:
        The gradient of x in its dtype, and that of `lora_A`, float32.

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    op, rank = "low_rank_input_gradients", lora_A.shape[0]
    if dx.ndim != 2 or x.shape != dx.shape or lora_A.shape != (rank, dx.shape[1]):
        raise ValueError(
            f"{op}: dx and x must be [N, E] and lora_A [R, E], got {list(dx.shape)}, {list(x.shape)}, "
            f"{list(lora_A.shape)}"
        )
    if dproducts.shape != (dx.shape[0], rank):
        raise ValueError(f"{op}: dproducts must be [{dx.shape[0]}, {rank}], got {list(dproducts.shape)}")
    _check_dtypes(op, dx, x, dproducts, lora_A)
    chosen = INPUT.chosen(implementation, rows=dx.shape[0], parts=dx.shape[1:], dtype=dx.dtype, rank=rank)
    return with_automatic_axes(chosen.forward, dx, x, dproducts, lora_A, rows_like=(dx, None))


def _why_not_triton(
    device: Target, rows: int, parts: tuple[int, ...], rank: int, float8: bool = False, **facts
) -> str | None:
    if float8 and (reason := device.lacks((8, 9), what="float8")):
        return reason
    if rank not in RANKS:
        return f"it serves ranks {list(RANKS)}, not {rank}"
    if rows % config.TILE or any(part % config.TILE for part in parts):
        return f"it takes whole tiles of {config.TILE}, not {rows} tokens by {list(parts)} features"
    return None


def _why_not_triton_output(device: Target, rank: int, **facts) -> str | None:
    if rank in RANKS and rank > config.LARGEST_OUTPUT_RANK:
        return f"beyond rank {config.LARGEST_OUTPUT_RANK} its partial sums cost more than a second pass over dy"
    return _why_not_triton(device, rank=rank, **facts)


def _triton(forward, why_not=_why_not_triton) -> Implementation:
    return Implementation(forward, dtypes=HALF, why_not=why_not)


#: forward(residual, base, products, lora_B, parts) -> sum
ADD = triton_or_xla("low_rank.add", _triton(triton.add), Implementation(xla.add))
#: forward(dy, products, lora_B, parts, absmax) -> (gradient of products, of lora_B, dy in float8 or None)
OUTPUT = triton_or_xla(
    "low_rank.output_gradients",
    _triton(triton.output_gradients, _why_not_triton_output),
    Implementation(xla.output_gradients),
)
#: forward(dx, x, dproducts, lora_A) -> (gradient of x, of lora_A)
INPUT = triton_or_xla("low_rank.input_gradients", _triton(triton.input_gradients), Implementation(xla.input_gradients))
#: forward(dy, absmax, lora_B, parts) -> (gradient of products, dy in float8)
ROUND = triton_or_xla("low_rank.round_rows", _triton(triton.round_rows), Implementation(xla.round_rows))


def _checked(op: str, rows: int, products: Array, lora_B: Array, parts: tuple[int, ...]) -> dict[str, Any]:
    rank = lora_B.shape[-1]
    if products.shape != (rows, len(parts) * rank):
        raise ValueError(
            f"{op}: for {rows} rows, {len(parts)} parts and rank {rank}, products must be [{rows}, "
            f"{len(parts) * rank}], got {list(products.shape)}"
        )
    _check_dtypes(op, products, lora_B)
    return {"rows": rows, "parts": parts, "dtype": products.dtype, "rank": rank}


def _check_parts(op: str, large: Array, lora_B: Array, parts: tuple[int, ...]) -> None:
    if large.ndim != 2 or sum(parts) != large.shape[1] or min(parts) < 1:
        raise ValueError(f"{op}: parts must add up to the columns of an array [N, F], got {parts}, {list(large.shape)}")
    if lora_B.ndim != 2 or lora_B.shape[0] != large.shape[1]:
        raise ValueError(
            f"{op}: for {list(large.shape)}, lora_B must be [{large.shape[1]}, R], got {list(lora_B.shape)}"
        )


def _check_absmax(op: str, dy: Array, absmax: Array) -> None:
    if absmax.shape != dy.shape[:1] or absmax.dtype != jnp.float32:
        raise ValueError(f"{op}: absmax must be float32[{dy.shape[0]}], got {absmax.dtype}{list(absmax.shape)}")


def _check_dtypes(op: str, *arrays: Array) -> None:
    if len({array.dtype for array in arrays}) > 1:
        raise ValueError(f"{op}: all operands must have one dtype, got {[str(array.dtype) for array in arrays]}")
