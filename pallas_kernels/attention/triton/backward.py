"""The backward kernels, with FlashAttention-2's recomputation (arXiv 2307.08691): one for dk and dv, one for dq.

With P = exp(logits − lse), Z the dropout's zeros and 1 / (1 − rate):

    dv = (P ∘ Z)ᵀ dout      dS = P ∘ (Z ∘ (dout vᵀ) − delta)      dq = scale · dS k      dk = scale · dSᵀ q

A program owns a tile of its result and adds up in registers, in one order: no atomics, the same bits every time.
The dk/dv kernel loops over the query heads of its key head, so nothing is kept for each query head; its products are
transposed (keys × queries), so that P and dS enter the next product from registers. Both kernels compute P: seven
products in place of the five that a single kernel with atomic additions needs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention.call import Cotangents, Operands, Options
from pallas_kernels.attention.triton.common import LOG2_E, KernelCall, offset_of_row
from pallas_kernels.attention.triton.config import Tiles, TritonConfig, triton_config
from pallas_kernels.attention.triton.intervals import Ranges, keys_of, queries_of, visit
from pallas_kernels.attention.triton.loads import load_numbers, load_rows, padded, rows_of, store_rows


def backward(
    operands: Operands,
    cotangents: Cotangents,
    options: Options,
    config: TritonConfig | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v in their dtypes.

    Args:
        operands: of the forward pass.
        cotangents: of its results.
        options: the call's.
        config: block sizes; by default `triton_config`.
        interpret: run on any device, in jax.numpy.
    """
    q, k, v, mask, _, seed = operands
    lse, delta, dout, _ = cotangents
    config = config or triton_config(q.shape[3], v.shape[3], options)
    arrays = (q, k, v, dout, lse * -LOG2_E, delta, mask.ranges, mask.query_offset, seed)
    dk, dv = dkv(*arrays, options, config.dkv, interpret)
    return dq(*arrays, options, config.dq, interpret), dk, dv


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(9, 10, 11))
def dkv(
    q, k, v, dout, shift, delta, ranges, query_offset, seed, options: Options, tiles: Tiles, interpret: bool
) -> tuple[Array, Array]:
    """The gradients of keys and values; shift is −lse in units of log 2."""
    batch, queries, heads, size = q.shape
    keys, kv_heads, value_size = v.shape[1:]
    groups = heads // kv_heads
    call = KernelCall(options, queries, keys, heads, groups, size, value_size, tiles, interpret)
    documents = None if ranges is None else Ranges(ranges.q_start, ranges.q_end)
    row = pl.BlockSpec((None, keys), lambda i, h, b: (b, 0))
    key, value = (
        pl.BlockSpec((None, keys, None, padded(width)), lambda i, h, b: (b, 0, h, 0)) for width in (size, value_size)
    )
    grouped, dgrouped = (
        pl.BlockSpec((None, queries, groups, padded(width)), lambda i, h, b: (b, 0, h, 0))
        for width in (size, value_size)
    )
    numbers = pl.BlockSpec((None, groups, queries), lambda i, h, b: (b, h, 0))
    return pl.pallas_call(
        functools.partial(_dkv_kernel, call=call),
        out_shape=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        grid=(pl.cdiv(keys, tiles.keys), kv_heads, batch),
        in_specs=[
            grouped,
            key,
            value,
            dgrouped,
            numbers,
            numbers,
            None if documents is None else Ranges(row, row),
            pl.BlockSpec(query_offset.shape, lambda i, h, b: (0,)),
            None if seed is None else pl.BlockSpec((2,), lambda i, h, b: (0,)),
        ],
        out_specs=(key, value),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_dkv",
    )(q, k, v, dout, shift, delta, documents, query_offset, seed)


def _dkv_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    shift_ref,
    delta_ref,
    ranges,
    offset_ref,
    seed_ref,
    dk_ref,
    dv_ref,
    *,
    call: KernelCall,
):
    options, tiles = call.options, call.tiles
    first = pl.program_id(0) * tiles.keys  # under a causal mask the first keys have most queries
    last = jnp.minimum(first + tiles.keys, call.keys) - 1
    offset, seeds = offset_of_row(offset_ref), call.seeds_of_row(seed_ref)
    first_head = pl.program_id(1) * call.groups
    keys = rows_of(first, tiles.keys)
    documents = ranges and ranges.of(first, tiles.keys, call.keys)
    visible = queries_of(keys, documents, offset, options)
    k = load_rows(k_ref, first, tiles.keys, call.size, limit=call.key_limit)
    v = load_rows(v_ref, first, tiles.keys, call.value_size, limit=call.key_limit)

    def body(tile, group, carry, *, masked: bool):
        dk, dv = carry
        start = tile * tiles.queries
        limit = call.query_limit if masked else None
        q = load_rows(q_ref, start, tiles.queries, call.size, limit=limit, head=group)
        products = call.capped(pltriton.dot(k, q, trans_b=True))
        shift = load_numbers(shift_ref, start, tiles.queries, limit=limit, other=-jnp.inf, head=group)
        weights = call.exp2(products, times=call.exponent, plus=shift[None, :])
        queries = rows_of(start, tiles.queries)
        if masked:
            weights = jnp.where(visible.mask(queries, limit), weights, 0.0)
        dout = load_rows(dout_ref, start, tiles.queries, call.value_size, limit=limit, head=group)
        dweights = pltriton.dot(v, dout, trans_b=True)
        delta = load_numbers(delta_ref, start, tiles.queries, limit=limit, other=0.0, head=group)
        dropped = weights
        if seeds is not None:
            kept = call.kept(seeds, first_head + group, queries[None, :], keys[:, None])
            dropped = jnp.where(kept, weights, 0.0)
            dweights = jnp.where(kept, dweights * (1.0 / (1.0 - options.dropout_rate)), 0.0)
        dv = dv + pltriton.dot(dropped.astype(dout.dtype), dout)
        dlogits = call.uncapped(products, weights * (dweights - delta[None, :]))
        dk = dk + pltriton.dot(dlogits.astype(q.dtype), q)
        return dk, dv

    zeros = [jnp.zeros((tiles.keys, padded(width)), jnp.float32) for width in (call.size, call.value_size)]
    bounds = [queries_of(row, ranges and ranges.at(row), offset, options) for row in (first, last)]
    dk, dv = visit(body, tuple(zeros), *bounds, tile=tiles.queries, length=call.queries, repeats=call.groups)
    store_rows(dk_ref, first, dk * options.scale, call.size, length=call.keys)
    store_rows(dv_ref, first, dv * (1.0 / (1.0 - options.dropout_rate)), call.value_size, length=call.keys)


@functools.partial(jax.jit, static_argnums=(9, 10, 11))
def dq(
    q, k, v, dout, shift, delta, ranges, query_offset, seed, options: Options, tiles: Tiles, interpret: bool
) -> Array:
    """The gradient of queries; shift is −lse in units of log 2."""
    batch, queries, heads, size = q.shape
    keys, kv_heads, value_size = v.shape[1:]
    groups = heads // kv_heads
    call = KernelCall(options, queries, keys, heads, groups, size, value_size, tiles, interpret)
    documents = None if ranges is None else Ranges(ranges.k_start, ranges.k_end)
    row = pl.BlockSpec((None, queries), lambda i, h, b: (b, 0))
    query, dquery = (
        pl.BlockSpec((None, queries, None, padded(width)), lambda i, h, b: (b, 0, h, 0)) for width in (size, value_size)
    )
    numbers = pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, 0))
    return pl.pallas_call(
        functools.partial(_dq_kernel, call=call),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(pl.cdiv(queries, tiles.queries), heads, batch),
        in_specs=[
            query,
            pl.BlockSpec((None, keys, None, padded(size)), lambda i, h, b: (b, 0, h // groups, 0)),
            pl.BlockSpec((None, keys, None, padded(value_size)), lambda i, h, b: (b, 0, h // groups, 0)),
            dquery,
            numbers,
            numbers,
            None if documents is None else Ranges(row, row),
            pl.BlockSpec(query_offset.shape, lambda i, h, b: (0,)),
            None if seed is None else pl.BlockSpec((2,), lambda i, h, b: (0,)),
        ],
        out_specs=query,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_dq",
    )(q, k, v, dout, shift, delta, documents, query_offset, seed)


def _dq_kernel(
    q_ref, k_ref, v_ref, dout_ref, shift_ref, delta_ref, ranges, offset_ref, seed_ref, dq_ref, *, call: KernelCall
):
    options, tiles = call.options, call.tiles
    first = (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.queries
    last = jnp.minimum(first + tiles.queries, call.queries) - 1
    offset, seeds = offset_of_row(offset_ref), call.seeds_of_row(seed_ref)
    head = pl.program_id(1)
    queries = rows_of(first, tiles.queries)
    documents = ranges and ranges.of(first, tiles.queries, call.queries)
    visible = keys_of(queries, documents, offset, options)
    q = load_rows(q_ref, first, tiles.queries, call.size, limit=call.query_limit)
    dout = load_rows(dout_ref, first, tiles.queries, call.value_size, limit=call.query_limit)
    shift = load_numbers(shift_ref, first, tiles.queries, limit=call.query_limit, other=-jnp.inf)
    delta = load_numbers(delta_ref, first, tiles.queries, limit=call.query_limit, other=0.0)

    def body(tile, _, dq, *, masked: bool):
        start = tile * tiles.keys
        limit = call.key_limit if masked else None
        k = load_rows(k_ref, start, tiles.keys, call.size, limit=limit)
        products = call.capped(pltriton.dot(q, k, trans_b=True))
        weights = call.exp2(products, times=call.exponent, plus=shift[:, None])
        keys = rows_of(start, tiles.keys)
        if masked:
            weights = jnp.where(visible.mask(keys, limit), weights, 0.0)
        v = load_rows(v_ref, start, tiles.keys, call.value_size, limit=limit)
        dweights = pltriton.dot(dout, v, trans_b=True)
        if seeds is not None:
            kept = call.kept(seeds, head, queries[:, None], keys[None, :])
            dweights = jnp.where(kept, dweights * (1.0 / (1.0 - options.dropout_rate)), 0.0)
        dlogits = call.uncapped(products, weights * (dweights - delta[:, None]))
        return dq + pltriton.dot(dlogits.astype(k.dtype), k)

    dq = jnp.zeros((tiles.queries, padded(call.size)), jnp.float32)
    bounds = [keys_of(row, ranges and ranges.at(row), offset, options) for row in (first, last)]
    dq = visit(body, dq, *bounds, tile=tiles.keys, length=call.keys)
    store_rows(dq_ref, first, dq * options.scale, call.size, length=call.queries)
