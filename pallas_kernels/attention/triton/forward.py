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

from pallas_kernels import compat
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.triton.common import LOG2_E, Call, query_offset
from pallas_kernels.attention.triton.config import TritonConfig
from pallas_kernels.attention.triton.intervals import Ranges, keys_of, visit
from pallas_kernels.attention.triton.loads import load_rows, padded, rows_of, store_numbers, store_rows

_LOWEST = -1e30


@functools.partial(jax.jit, static_argnames=("options", "config", "interpret"))
def forward(
    q: Array,
    k: Array,
    v: Array,
    mask,
    sinks: Array | None,
    seed: Array | None,
    *,
    options: Options,
    config: TritonConfig,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The weighted values and the log-sum-exp of each query's logits.

    Args:
        q: queries [B, S, H, D], bfloat16 or float16.
        k: keys [B, T, K, D].
        v: values [B, T, K, Dv].
        mask: ranges and query_offset, int32 [1] or [B].
        sinks: float32 [H], or None.
        seed: uint32 [2] of the dropout, or None.
        options: the static part of the call.
        config: block sizes.
        interpret: run on any device, in jax.numpy.

    Returns:
        Values [B, S, H, Dv] in q's dtype and log-sum-exp [B, H, S] in float32; zeros and +inf for a query that sees
        neither key nor sink.
    """
    compat.silence_triton_deprecation()
    batch, queries, heads, size = q.shape
    keys, kv_heads, value_size = v.shape[1:]
    groups, tiles = heads // kv_heads, config.forward
    if options.scale <= 0.0:  # the kernel takes the maximum before it scales
        q = q * jnp.asarray(math.copysign(1.0, options.scale) if options.scale else 0.0, q.dtype)
        options = dataclasses.replace(options, scale=-options.scale or 1.0)
    call = Call(options, queries, keys, heads, groups, size, value_size, tiles, interpret)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i, h, b: (0,) * len(shape))

    row = pl.BlockSpec((None, queries), lambda i, h, b: (b, 0))
    ranges = mask.ranges
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
            None if ranges is None else Ranges(row, row),
            whole(*mask.query_offset.shape),
            None if sinks is None else whole(heads),
            None if seed is None else whole(2),
        ],
        out_specs=(
            pl.BlockSpec((None, queries, None, padded(value_size)), lambda i, h, b: (b, 0, h, 0)),
            pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, 0)),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_forward",
    )(q, k, v, None if ranges is None else Ranges(ranges.k_start, ranges.k_end), mask.query_offset, sinks, seed)


def _kernel(q_ref, k_ref, v_ref, ranges, offset_ref, sinks_ref, seed_ref, out_ref, lse_ref, *, call: Call):
    options, tiles = call.options, call.tiles
    first = (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.queries
    last = jnp.minimum(first + tiles.queries, call.queries) - 1
    head = pl.program_id(1)
    offset = query_offset(offset_ref)
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
        if options.dropout_rate:
            weights = jnp.where(call.kept(seed_ref, head, queries[:, None], keys[None, :]), weights, 0.0)
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
