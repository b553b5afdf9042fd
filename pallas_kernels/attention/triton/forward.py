"""The forward kernel: a program owns a tile of one head's queries and loops over tiles of its keys.

The running maximum starts at a finite number, so a tile that hides every key of a row leaves the row as it is without
a special case. Sinks are a first key of value 0. Longest programs start first: under a causal mask the last tiles.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention.call import Operands, Options
from pallas_kernels.attention.triton.common import LOG2_E, KernelCall, offset_of_row
from pallas_kernels.attention.triton.config import Tiles, TritonConfig, triton_config
from pallas_kernels.attention.triton.intervals import Ranges, keys_of, visit
from pallas_kernels.attention.triton.loads import load_rows, padded, rows_of, store_numbers, store_rows

_LOWEST = -1e30


def forward(
    operands: Operands, options: Options, config: TritonConfig | None = None, *, interpret: bool = False
) -> tuple[Array, Array]:
    """The output [B, S, H, Dv] in q's dtype and the log-sum-exp of each query's logits [B, H, S] in float32.

    Args:
        operands: of the call, bfloat16 or float16.
        options: the call's.
        config: block sizes; by default `triton_config`.
        interpret: run on any device, in jax.numpy.
    """
    q, k, v, mask, sinks, seed = operands
    config = config or triton_config(q.shape[3], v.shape[3], options)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    if options.scale <= 0.0:  # the kernel takes the maximum before it scales
        q = q * jnp.asarray(-1.0 if options.scale else 0.0, q.dtype)
        options = dataclasses.replace(options, scale=-options.scale or 1.0)
    return _forward(q, k, v, mask.ranges, mask.query_offset, sinks, seed, options, config.forward, interpret)


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(7, 8, 9))
def _forward(q, k, v, ranges, query_offset, sinks, seed, options: Options, tiles: Tiles, interpret: bool):
    batch, queries, heads, size = q.shape
    keys, kv_heads, value_size = v.shape[1:]
    groups = heads // kv_heads
    call = KernelCall(options, queries, keys, heads, groups, size, value_size, tiles, interpret)
    documents = None if ranges is None else Ranges(ranges.k_start, ranges.k_end)
    row = pl.BlockSpec((None, queries), lambda i, h, b: (b, 0))
    return pl.pallas_call(
        functools.partial(_kernel, call=call),
        out_shape=(
            jax.ShapeDtypeStruct((batch, queries, heads, value_size), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        ),
        grid=(pl.cdiv(queries, tiles.queries), heads, batch),
        in_specs=[
            pl.BlockSpec((None, queries, None, padded(size)), lambda i, h, b: (b, 0, h, 0)),
            pl.BlockSpec((None, keys, None, padded(size)), lambda i, h, b: (b, 0, h // groups, 0)),
            pl.BlockSpec((None, keys, None, padded(value_size)), lambda i, h, b: (b, 0, h // groups, 0)),
            None if documents is None else Ranges(row, row),
            pl.BlockSpec(query_offset.shape, lambda i, h, b: (0,)),
            None if sinks is None else pl.BlockSpec((heads,), lambda i, h, b: (0,)),
            None if seed is None else pl.BlockSpec((2,), lambda i, h, b: (0,)),
        ],
        out_specs=(
            pl.BlockSpec((None, queries, None, padded(value_size)), lambda i, h, b: (b, 0, h, 0)),
            pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, 0)),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_forward",
    )(q, k, v, documents, query_offset, sinks, seed)


def _kernel(q_ref, k_ref, v_ref, ranges, offset_ref, sinks_ref, seed_ref, out_ref, lse_ref, *, call: KernelCall):
    options, tiles = call.options, call.tiles
    first = (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.queries
    last = jnp.minimum(first + tiles.queries, call.queries) - 1
    head = pl.program_id(1)
    offset, seeds = offset_of_row(offset_ref), call.seeds_of_row(seed_ref)
    queries = rows_of(first, tiles.queries)
    documents = ranges and ranges.of(first, tiles.queries, call.queries)
    visible = keys_of(queries, documents, offset, options)
    q = load_rows(q_ref, first, tiles.queries, call.size, limit=call.query_limit)
    if sinks_ref is None:
        maximum = jnp.full((tiles.queries,), _LOWEST, jnp.float32)
        total = jnp.zeros((tiles.queries,), jnp.float32)
    else:
        sink = jnp.full((tiles.queries,), sinks_ref[head] * LOG2_E, jnp.float32)
        maximum = jnp.maximum(sink, _LOWEST)
        total = call.exp2(sink - maximum)

    def body(tile, _, carry, *, masked: bool):
        out, maximum, total = carry
        start = tile * tiles.keys
        limit = call.key_limit if masked else None
        k = load_rows(k_ref, start, tiles.keys, call.size, limit=limit)
        logits = call.capped(pltriton.dot(q, k, trans_b=True))
        keys = rows_of(start, tiles.keys)
        if masked:
            logits = jnp.where(visible.mask(keys, limit), logits, -jnp.inf)
        higher = jnp.maximum(maximum, jnp.max(logits, axis=1) * call.exponent)
        weights = call.exp2(logits, times=call.exponent, plus=-higher[:, None])
        correction = call.exp2(maximum - higher)
        total = total * correction + jnp.sum(weights, axis=1)
        if seeds is not None:
            weights = jnp.where(call.kept(seeds, head, queries[:, None], keys[None, :]), weights, 0.0)
        v = load_rows(v_ref, start, tiles.keys, call.value_size, limit=limit)
        out = out * correction[:, None] + pltriton.dot(weights.astype(v.dtype), v)
        return out, higher, total

    out = jnp.zeros((tiles.queries, padded(call.value_size)), jnp.float32)
    bounds = [keys_of(row, ranges and ranges.at(row), offset, options) for row in (first, last)]
    out, maximum, total = visit(body, (out, maximum, total), *bounds, tile=tiles.keys, length=call.keys)
    empty = total == 0.0
    inverse = 1.0 / (jnp.where(empty, 1.0, total) * (1.0 - options.dropout_rate))
    store_rows(out_ref, first, out * inverse[:, None], call.value_size, length=call.queries)
    lse = jnp.where(empty, jnp.inf, maximum * math.log(2.0) + jnp.log(total))
    store_numbers(lse_ref, first, lse, length=call.queries)
