"""Attention to pages in Triton: a program owns one key head of a row, or a part of its tokens.

With few rows their tokens are split, so that every multiprocessor reads: the parts' sums, with their maxima, are put
together by XLA (as FlashDecoding and FlashAttention-3 do).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.dispatch import num_cores

_LOG2_E = math.log2(math.e)
_LOWEST = -1e30
#: Tokens that a program reads at once, at most: measured on an H100 (docs/lab/attention.md).
_TILE = 64
_NUM_WARPS, _NUM_STAGES = 2, 4


def forward(
    q, keys, values, table, lengths, layer, sinks, options, *, splits: int | None = None, interpret: bool = False
) -> Array:
    """As `api.REGISTRY` has it.

    Args:
        q: bfloat16 or float16.
        keys: as of `api.paged_attention`.
        values: as there.
        table: as of `api.paged_attention`.
        lengths: as there.
        layer: as there.
        sinks: as there.
        options: of the call.
        splits: parts of a row's tokens; None: by the number of rows and heads.
        interpret: run on any device, in jax.numpy.
    """
    if splits is None:
        tokens = table.shape[1] * keys.shape[3]
        seen = tokens if options.sliding_window is None else min(tokens, options.sliding_window + keys.shape[3])
        splits = split_count(q.shape[0] * keys.shape[2], seen, num_cores())
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    return _forward(q, keys, values, table, lengths, layer.reshape(1), sinks, options, splits, interpret)


def split_count(programs: int, tokens: int, cores: int) -> int:
    """Parts of a row's tokens: as many as run at once, two programs a multiprocessor, each of two tiles or more.

    Args:
        programs: without parts.
        tokens: most tokens of a row that are seen.
        cores: multiprocessors.
    """
    return max(1, min(2 * cores // programs, tokens // (2 * _TILE), 64))


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(7, 8, 9))
def _forward(q, keys, values, table, lengths, layer, sinks, options, splits: int, interpret: bool):
    rows, heads, size = q.shape
    kv_heads, page, value_size = values.shape[2:]
    groups = heads // kv_heads
    padded = max(16, pl.next_power_of_2(groups))
    by_part = lambda r, h, s: (r, s, h, 0)  # noqa: E731
    out, maximum, total = pl.pallas_call(
        functools.partial(_kernel, options=options, groups=groups, page=page, tile=min(_TILE, page), splits=splits),
        out_shape=(
            jax.ShapeDtypeStruct((rows, splits, kv_heads, groups, value_size), jnp.float32 if splits > 1 else q.dtype),
            *(jax.ShapeDtypeStruct((rows, splits, kv_heads, groups), jnp.float32),) * 2,
        ),
        grid=(rows, kv_heads, splits),
        in_specs=[
            pl.BlockSpec((None, None, padded, size), lambda r, h, s: (r, h, 0, 0)),
            *(pl.no_block_spec,) * 5,
            None if sinks is None else pl.BlockSpec((None, padded), lambda r, h, s: (h, 0)),
        ],
        out_specs=(
            pl.BlockSpec((None, None, None, padded, value_size), lambda r, h, s: (r, s, h, 0, 0)),
            *(pl.BlockSpec((None, None, None, padded), by_part),) * 2,
        ),
        compiler_params=pltriton.CompilerParams(num_warps=_NUM_WARPS, num_stages=_NUM_STAGES),
        interpret=interpret,
        name="paged_attention",
    )(
        q.reshape(rows, kv_heads, groups, size),
        *(keys, values, table, lengths, layer),
        None if sinks is None else sinks.reshape(kv_heads, groups),
    )
    if splits == 1:
        return out.reshape(rows, heads, value_size)
    factor = jnp.exp2(maximum - jnp.max(maximum, axis=1, keepdims=True))
    whole = jnp.sum(factor * total, axis=1)[..., None]
    out = jnp.sum(factor[..., None] * out, axis=1) / jnp.where(whole == 0.0, 1.0, whole)
    return out.astype(q.dtype).reshape(rows, heads, value_size)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    lengths_ref,
    layer_ref,
    sinks_ref,
    out_ref,
    maximum_ref,
    total_ref,
    *,
    options,
    groups: int,
    page: int,
    tile: int,
    splits: int,
):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    length, layer = lengths_ref[row], layer_ref[0]
    group = jax.lax.iota(jnp.int32, q_ref.shape[0])
    q = pltriton.load(q_ref.at[:, :], mask=(group < groups)[:, None], other=jnp.zeros((), q_ref.dtype))
    start = 0 if options.sliding_window is None else jnp.maximum(length - options.sliding_window, 0)
    first, last = start // tile, pl.cdiv(length, tile)
    each = pl.cdiv(last - first, splits)
    low = first + part * each
    cap = options.logits_soft_cap
    maximum = jnp.full(group.shape, _LOWEST, jnp.float32)
    total = jnp.zeros(group.shape, jnp.float32)
    if sinks_ref is not None:  # a first token of value 0, of the first part
        sink = pltriton.load(sinks_ref.at[:], mask=group < groups, other=jnp.float32(0)) * _LOG2_E
        maximum = jnp.where(part == 0, jnp.maximum(sink, _LOWEST), maximum)
        total = jnp.where(part == 0, jnp.exp2(sink - maximum), total)

    def body(number, carry):
        out, maximum, total = carry
        where = pl.ds(number % (page // tile) * tile, tile)
        here = table_ref[row, number // (page // tile)]
        k = pltriton.load(k_ref.at[layer, here, head, where, :]).astype(q.dtype)
        logits = pltriton.dot(q, k, trans_b=True)
        if cap is None:
            logits = logits * (options.scale * _LOG2_E)
        else:
            logits = jnp.tanh(logits * (options.scale / cap)) * (cap * _LOG2_E)
        token = number * tile + jax.lax.iota(jnp.int32, tile)
        seen = (token < length) & (token >= start)
        logits = jnp.where(seen[None, :], logits, -jnp.inf)
        higher = jnp.maximum(maximum, jnp.max(logits, axis=1))
        weights, correction = jnp.exp2(logits - higher[:, None]), jnp.exp2(maximum - higher)
        # Slots behind the last token may hold anything, NaN too.
        v = pltriton.load(v_ref.at[layer, here, head, where, :], mask=seen[:, None], other=jnp.zeros((), v_ref.dtype))
        out = out * correction[:, None] + pltriton.dot(weights.astype(q.dtype), v.astype(q.dtype))
        return out, higher, total * correction + jnp.sum(weights, axis=1)

    out = jnp.zeros((group.size, v_ref.shape[-1]), jnp.float32)
    out, maximum, total = jax.lax.fori_loop(low, jnp.minimum(low + each, last), body, (out, maximum, total))
    if splits == 1:
        out = out / jnp.where(total == 0.0, 1.0, total)[:, None]
    pltriton.store(out_ref.at[:, :], out.astype(out_ref.dtype), mask=(group < groups)[:, None])
    pltriton.store(maximum_ref.at[:], maximum, mask=group < groups)
    pltriton.store(total_ref.at[:], total, mask=group < groups)
