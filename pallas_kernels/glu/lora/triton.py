"""The gated unit between adapters in Pallas-Triton, for NVIDIA GPUs from Ampere on; arguments as in `api`.

In the forward kernel a program owns a tile of tokens and a run of features, over which it adds up its share of h·Aᵀ; in
the backward kernel it owns a tile of features and a run of tokens, over which it adds up its share of the gradients of
B and A. The shares are added by XLA in one order: no atomics, the same bits every time.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.dispatch import compute_capability
from pallas_kernels.float8.scaled import Rounded, Scaled, Thin, product_of, thin, thin_values_at
from pallas_kernels.float8.scales import exponent_of, scale_of
from pallas_kernels.float8.triton import Blocks, join_blocks
from pallas_kernels.glu.lora import config
from pallas_kernels.glu.reference import ACTIVATIONS
from pallas_kernels.tiles import Tiles, divisor


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) in three instructions and two of the special unit, where exp and a division take twenty."""
    root = jax.lax.rsqrt(1.0 + jnp.exp2(x * -math.log2(math.e)))
    return root * root


@jax.custom_jvp
def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


@_silu.defjvp
def _silu_jvp(primals, tangents):
    sigmoid = _sigmoid(*primals)
    y = primals[0] * sigmoid
    return y, tangents[0] * (sigmoid + y * (1.0 - sigmoid))


_ACTIVATIONS = {**ACTIVATIONS, "silu": _silu, "swish": _silu}


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def forward(
    gate_up: Array | Scaled,
    products: Array | None,
    lora_B: Array | None,
    down_A: Array | None,
    activation: str,
    rounded: bool = False,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array | Rounded, Array | None]:
    """The gated product h; h·Aᵀ or None."""
    tiles = tiles or config.forward_config(compute_capability(), _largest_rank(lora_B, down_A))
    scales, [gate_up] = thin([gate_up])
    (rows, width), dtype = product_of(gate_up).shape, product_of(gate_up).dtype
    features = width // 2
    loop = divisor(features // tiles.columns, tiles.loop)
    shares = features // tiles.columns // loop
    h: Any = _blocks(rows, features, tiles) if rounded else jax.ShapeDtypeStruct((rows, features), dtype)
    partial = None if down_A is None else jax.ShapeDtypeStruct((shares, rows, down_A.shape[0]), jnp.float32)
    h, down_products = pl.pallas_call(
        functools.partial(_forward, dtype=dtype, activation=activation, tiles=tiles, loop=loop),
        out_shape=(h, partial),
        grid=(rows // tiles.rows, shares),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="glu_lora_forward",
    )(gate_up, products, lora_B, down_A, scales)
    if rounded:
        h = join_blocks(h, interpret=interpret)
    return h, None if down_products is None else jnp.sum(down_products, axis=0).astype(dtype)


def _largest_rank(lora_B: Array | None, down_A: Array | None) -> int:
    return max(0 if lora_B is None else lora_B.shape[-1], 0 if down_A is None else down_A.shape[0])


def _blocks(rows: int, width: int, tiles: Tiles) -> Any:
    """The shapes of rows in float8 whose blocks are a tile's columns."""
    codes = jax.ShapeDtypeStruct((rows, width), jnp.float8_e4m3fn)
    return Blocks(codes, jax.ShapeDtypeStruct((width // tiles.columns, rows), jnp.uint8))  # pyright: ignore


def _forward(
    gate_up_ref,
    products_ref,
    b_ref,
    a_ref,
    scales_ref,
    h_ref,
    down_products_ref,
    *,
    dtype,
    activation: str,
    tiles: Tiles,
    loop: int,
):
    rows, share = pl.ds(pl.program_id(0) * tiles.rows, tiles.rows), pl.program_id(1)
    features = product_of(gate_up_ref).shape[1] // 2
    products = _rank_products(products_ref, b_ref, rows)
    of_rows = None if scales_ref is None else scales_ref[rows, :]

    def body(number, total):
        start = (share * loop + number) * tiles.columns
        cols = pl.ds(start, tiles.columns)
        halves = _halves(gate_up_ref, rows, start, features, tiles.columns, of_rows)
        gate, up = _with_adapters(halves, products, _of_halves(b_ref, cols))
        h = (_ACTIVATIONS[activation](gate) * up).astype(dtype)
        if isinstance(h_ref, Blocks):
            _keep(h_ref, h.astype(jnp.float32), rows, start)
        else:
            h_ref[rows, cols] = h
        return () if a_ref is None else (total[0] + pltriton.dot(h, a_ref[:, cols], trans_b=True),)

    zero = () if a_ref is None else (jnp.zeros((tiles.rows, a_ref.shape[0]), jnp.float32),)
    total = jax.lax.fori_loop(0, loop, body, zero)
    if a_ref is not None:
        down_products_ref[share, rows, :] = total[0]


@functools.partial(jax.jit, static_argnums=(6, 7, 8, 9, 10))
def backward(
    gate_up: Array | Scaled,
    products: Array | None,
    lora_B: Array | None,
    dh: Array | Scaled,
    down_A: Array | None,
    dproducts: Array | None,
    activation: str,
    with_h: bool = False,
    with_absmax: bool = False,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array | None, Array | None, Array | None]:
    """The gradients of `gate_up` in the dtype of dh, h or None, those of B or None, of A or None, absmax or None."""
    tiles = tiles or config.backward_config(compute_capability(), _largest_rank(lora_B, down_A))
    scales, [gate_up, dh] = thin([gate_up, dh])
    rows, features = product_of(dh).shape
    loop = divisor(rows // tiles.rows, tiles.loop)
    shares = rows // tiles.rows // loop
    dB = dA = None
    if lora_B is not None:
        dB = jax.ShapeDtypeStruct((shares, *lora_B.shape), jnp.float32)
    if down_A is not None:
        dA = jax.ShapeDtypeStruct((shares, *down_A.shape), jnp.float32)
    own = [jax.ShapeDtypeStruct((rows, width), product_of(dh).dtype) for width in (2 * features, features)]
    # A program writes a tile's gradients, and h, where it has read the tile.
    aliases = {0: 0}
    if with_h:
        aliases[len(jax.tree.leaves((gate_up, products, lora_B)))] = 1
    absmax = jax.ShapeDtypeStruct((features // tiles.columns, rows), own[0].dtype) if with_absmax else None
    dgate_up, h, dB, dA, absmax = pl.pallas_call(
        functools.partial(_backward, activation=activation, tiles=tiles, loop=loop),
        out_shape=(own[0], own[1] if with_h else None, dB, dA, absmax),
        grid=(features // tiles.columns, shares),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        input_output_aliases=aliases,
        interpret=interpret,
        name="glu_lora_backward",
    )(gate_up, products, lora_B, dh, down_A, dproducts, scales)
    dB, dA = (None if shares is None else jnp.sum(shares, axis=0) for shares in (dB, dA))
    return dgate_up, h, dB, dA, None if absmax is None else jnp.max(absmax, axis=0).astype(jnp.float32)


def _backward(
    gate_up_ref,
    products_ref,
    b_ref,
    dh_ref,
    a_ref,
    dproducts_ref,
    scales_ref,
    dgate_up_ref,
    h_ref,
    dB_ref,
    dA_ref,
    absmax_ref,
    *,
    activation: str,
    tiles: Tiles,
    loop: int,
):
    tile, share = pl.program_id(0), pl.program_id(1)
    start, features = tile * tiles.columns, product_of(dh_ref).shape[1]
    cols, up_cols = pl.ds(start, tiles.columns), pl.ds(features + start, tiles.columns)
    lora_B = _of_halves(b_ref, cols)
    down_A = None if a_ref is None else a_ref[:, cols]
    dtype = dgate_up_ref.dtype
    # Read once: a program's columns stay the same.
    columns = [gate_up_ref.columns[at, :] for at in (cols, up_cols)] if isinstance(gate_up_ref, Thin) else (None, None)
    below = dh_ref.columns[cols, :] if isinstance(dh_ref, Thin) else None

    def body(number, carry):
        rows = pl.ds((share * loop + number) * tiles.rows, tiles.rows)
        products = _rank_products(products_ref, b_ref, rows)
        of_rows = None if scales_ref is None else scales_ref[rows, :]
        halves = _halves(gate_up_ref, rows, start, features, tiles.columns, of_rows, columns)
        gate, up = _with_adapters(halves, products, lora_B)
        dh = thin_values_at(dh_ref, rows, cols, of_rows, below)
        dproducts = None
        if down_A is not None:
            dproducts = dproducts_ref[rows, :]
            dh = dh + pltriton.dot(dproducts, down_A)
        # In this order, the derivative last, the fewest values wait in registers: three programs fit a multiprocessor.
        activated = _ACTIVATIONS[activation](gate)
        h = (activated * up).astype(dtype)
        dup = (dh * activated).astype(dtype)
        dgate_up_ref[rows, up_cols] = dup
        (dgate,) = jax.vjp(_ACTIVATIONS[activation], gate)[1](dh * up)
        if absmax_ref is not None:  # the rounded largest is the largest of rounded ones
            widest = jnp.maximum(jnp.abs(dgate), jnp.abs(dup.astype(jnp.float32)))
            absmax_ref[tile, rows] = jnp.max(widest, axis=1).astype(dtype)
        dgate = dgate.astype(dtype)
        dgate_up_ref[rows, cols] = dgate
        if h_ref is not None:
            h_ref[rows, cols] = h
        sums = []
        if products is not None:
            sums += [pltriton.dot(d, product, trans_a=True) for d, product in zip((dgate, dup), products, strict=True)]
        if dproducts is not None:
            sums.append(pltriton.dot(dproducts, h, trans_a=True))
        return tuple(total + part for total, part in zip(carry, sums, strict=True))

    shapes = [] if b_ref is None else [(tiles.columns, b_ref.shape[-1])] * 2
    shapes += [] if a_ref is None else [(a_ref.shape[0], tiles.columns)]
    sums = list(jax.lax.fori_loop(0, loop, body, tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)))
    if a_ref is not None:
        dA_ref[share, :, cols] = sums.pop()
    for half, total in enumerate(sums):
        dB_ref[share, half, cols, :] = total


def _rank_products(products_ref, b_ref, rows) -> tuple[Array, Array] | None:
    """The rank products of gate and up for some tokens; one array twice where they share it."""
    if products_ref is None:
        return None
    rank = b_ref.shape[-1]
    gate = products_ref[rows, pl.ds(0, rank)]
    return gate, gate if products_ref.shape[1] == rank else products_ref[rows, pl.ds(rank, rank)]


def _of_halves(b_ref, cols) -> tuple[Array, Array] | None:
    return None if b_ref is None else (b_ref[0, cols, :], b_ref[1, cols, :])


def _halves(
    gate_up_ref, rows, start, features: int, columns: int, of_rows, of_columns: Sequence[Array | None] = (None, None)
) -> list[Array]:
    """Gate and up of a tile, float32; the scales of a product in float8 as for `thin_values_at`."""
    starts = [half * features + start for half in (0, 1)]
    pairs = zip(starts, of_columns, strict=True)
    return [thin_values_at(gate_up_ref, rows, pl.ds(first, columns), of_rows, own) for first, own in pairs]


def _keep(kept: Blocks, values: Array, rows, start) -> None:
    """Write a tile in float8, its columns from `start` on one block."""
    (codes_ref, exponents_ref), columns = kept, values.shape[1]
    scale, inverse = scale_of(jnp.max(jnp.abs(values), axis=1))
    codes_ref[rows, pl.ds(start, columns)] = (values * inverse[:, None]).astype(codes_ref.dtype)
    exponents_ref[start // columns, rows] = exponent_of(scale)


def _with_adapters(halves: list[Array], products, lora_B) -> list[Array]:
    """Gate and up with their adapters' sums."""
    if products is None or lora_B is None:
        return halves
    pairs = zip(halves, products, lora_B, strict=True)
    return [half + pltriton.dot(product, b, trans_b=True) for half, product, b in pairs]
