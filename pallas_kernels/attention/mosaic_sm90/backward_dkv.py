"""The backward pass in the keys and values: dv = Pᵀ dout, dk = scale · dSᵀ q.

A thread block takes a tile of keys of one key head, the heaviest tiles first. One warpgroup loads; two hold
accumulators and run over the queries of every query head that shares the key head, so that no gradient of a single
query head is ever in memory and the order of all sums is fixed. Everything is transposed: rows are keys, columns
queries. A tile is 128 keys, 64 to a warpgroup; where both accumulators of a warpgroup would not fit into its registers
it is 64 keys, of which one warpgroup computes dk and the other dv.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.mosaic_sm90 import common
from pallas_kernels.attention.mosaic_sm90.common import COLUMNS, WARPGROUP_ROWS, broadcast_columns
from pallas_kernels.attention.mosaic_sm90.config import CONSUMER_REGISTERS, PRODUCER_REGISTERS, DkvConfig
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.ranges import TILE


@functools.partial(jax.jit, static_argnames=("options", "config", "interpret"))
def backward_dkv(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    mask: Mask,
    seed: Array | None,
    *,
    options: Options,
    config: DkvConfig,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """The gradients of k and v; arguments as in `backward_dq`."""
    batch, keys, key_heads, size = k.shape
    value_size, tiles = v.shape[3], pl.cdiv(keys, TILE)
    parts, stages, block = 1 if config.split else 2, config.stages, config.block_q
    blocks = batch * tiles * key_heads * (2 // parts)
    key_tile, value_tile = (common.transforms(columns, block) for columns in (size, value_size))
    scratch = {
        "k_smem": plgpu.SMEM((parts, WARPGROUP_ROWS, size), q.dtype, transforms=key_tile),
        "v_smem": plgpu.SMEM((parts, WARPGROUP_ROWS, value_size), q.dtype, transforms=value_tile),
        "q_smem": plgpu.SMEM((stages, block, size), q.dtype, transforms=key_tile),
        "do_smem": plgpu.SMEM((stages, block, value_size), q.dtype, transforms=value_tile),
        "statistics": plgpu.SMEM((stages, 2, block), jnp.float32),
        "kv_full": plgpu.Barrier(num_barriers=parts, num_arrivals=2),
        "full": plgpu.Barrier(num_barriers=stages, num_arrivals=4),
        "free": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        "done": plgpu.Barrier(num_arrivals=2),
    }
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, "seed": seed}
    inputs |= common.key_inputs(mask, options)
    outputs = {"dk": jax.ShapeDtypeStruct(k.shape, k.dtype), "dv": jax.ShapeDtypeStruct(v.shape, v.dtype)}
    body = functools.partial(_kernel, tiles=tiles, options=options, config=config)
    dk, dv = common.launch(body, inputs, outputs, scratch, blocks, "attention_backward_dkv", interpret)
    return dk, dv


def _kernel(refs, *, tiles: int, options: Options, config: DkvConfig):
    batch, keys, key_heads, _ = refs.k.shape
    group = refs.q.shape[2] // key_heads
    rows = common.Rows(refs.start, refs.end, refs.offset, keys, refs.q.shape[1], options, transposed=True)
    warpgroup = lax.axis_index("warpgroup")
    parts = 1 if config.split else 2

    def tile(place):
        size = parts * WARPGROUP_ROWS
        return common.key_tile(place, rows, refs.order, batch, key_heads, tiles, size, config.block_q)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _load(refs, tile, group, parts, config)

    def compute(part, wanted):
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        _compute(refs, tile, rows, part, group, wanted, options, config)

    if config.split:
        pl.when(warpgroup == 0)(lambda: compute(0, "k"))
        pl.when(warpgroup == 1)(lambda: compute(0, "v"))
    else:
        pl.when(warpgroup < 2)(lambda: compute(warpgroup, "kv"))


def _load(refs, tile, group: int, parts: int, config: DkvConfig):
    """What the loading warpgroup does: the tile's keys and values, then the queries that see them."""
    block, stages = config.block_q, config.stages
    row, first, key_head, low, inner, outer, high = tile(lax.axis_index("cta"))
    for part in range(parts):
        place = (row, pl.ds(first + part * WARPGROUP_ROWS, WARPGROUP_ROWS), key_head)
        plgpu.copy_gmem_to_smem(refs.k.at[place], refs.k_smem.at[part], refs.kv_full.at[part])
        plgpu.copy_gmem_to_smem(refs.v.at[place], refs.v_smem.at[part], refs.kv_full.at[part])

    def load_block(head, index, count):
        slot = lax.rem(count, jnp.int32(stages))
        queries = pl.ds(index * block, block)
        pl.when(count >= stages)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        for array, smem in ((refs.q, refs.q_smem), (refs.dout, refs.do_smem)):
            plgpu.copy_gmem_to_smem(array.at[row, queries, head], smem.at[slot], refs.full.at[slot])
        for number, array in enumerate((refs.lse, refs.delta)):
            place = refs.statistics.at[slot, number]
            plgpu.copy_gmem_to_smem(array.at[row, head, queries], place, refs.full.at[slot])
        return count + 1

    def load_head(start, stop, member, count):
        return lax.fori_loop(start, stop, functools.partial(load_block, key_head * group + member), count)

    count = jnp.int32(0)
    for start, stop in ((low, inner), (inner, outer), (outer, high)):
        count = lax.fori_loop(0, group, functools.partial(load_head, start, stop), count)


def _compute(refs, tile, rows: common.Rows, part, group: int, wanted: str, options: Options, config: DkvConfig):
    """What a computing warpgroup does: the gradients of 64 keys, values or both."""
    batch_index, first, key_head, low, inner, outer, high = tile(lax.axis_index("cta"))
    block, stages, dtype = config.block_q, jnp.int32(config.stages), refs.q.dtype
    first = first + part * WARPGROUP_ROWS
    k_smem, v_smem = refs.k_smem.at[part], refs.v_smem.at[part]
    plgpu.barrier_wait(refs.kv_full.at[part])

    def step(dk_ref, dv_ref, masked, begin, blocks, turn, count):
        slot = lax.rem(count, stages)
        query = (begin + lax.rem(turn, blocks)) * block
        q_smem, do_smem = refs.q_smem.at[slot], refs.do_smem.at[slot]

        def dropped(p, factor):
            number = batch_index * refs.q.shape[2] + key_head * group + lax.div(turn, blocks)
            keep = common.kept(p.shape, refs.seed, number, first, query, options, True)
            return jnp.where(keep, p * factor, 0.0)

        shape = (WARPGROUP_ROWS, block)

        def columns(index):
            return broadcast_columns(compat.mosaic_load(refs.statistics.at[slot, index], COLUMNS), shape)

        def weights(s_ref, pending):
            s, factor, slope = common.capped(plgpu.wgmma_accumulator_load(s_ref, wait_n=pending), options)
            if masked:
                s = rows.mask(s, batch_index, first, query)
            return jnp.exp2(s * factor if options.logits_soft_cap is None else s * factor + columns(0)), slope

        def add_values(p):
            if options.dropout_rate:
                p = dropped(p, 1 / (1 - options.dropout_rate))
            plgpu.wgmma(dv_ref, p.astype(dtype), do_smem)

        def products(s_ref, dp_ref=None):
            plgpu.barrier_wait(refs.full.at[slot])
            if options.logits_soft_cap is None:
                s_ref[...] = columns(0)
            if dp_ref is not None and not options.dropout_rate:
                dp_ref[...] = columns(1)
            plgpu.wgmma(s_ref, k_smem, q_smem.T)
            if dp_ref is None:
                p, _ = weights(s_ref, 0)
                add_values(p)
                return
            plgpu.wgmma(dp_ref, v_smem, do_smem.T)
            p, slope = weights(s_ref, 1)
            if dv_ref is not None:
                add_values(p)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0 if dv_ref is None else 1)
            if options.dropout_rate:
                dp = dropped(dp, 1 / (1 - options.dropout_rate)) + columns(1)
            ds = p * dp
            plgpu.wgmma(dk_ref, (ds if slope is None else ds * slope).astype(dtype), q_smem)

        accumulator = common.accumulator(*shape)
        pl.run_scoped(products, *[accumulator] * (1 if dk_ref is None else 2))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs.free.at[slot])
        return count + 1

    def gradients(*accumulators):
        dk_ref = accumulators[0] if "k" in wanted else None
        dv_ref = accumulators[-1] if "v" in wanted else None

        # The blocks of all heads that need a mask, those that need none, and those at the other end.
        count = jnp.int32(0)
        for bounded, begin, stop in (
            (rows.bounded_below, low, inner),
            (None, inner, outer),
            (rows.bounded_above, outer, high),
        ):
            if bounded is not False:
                body = functools.partial(step, dk_ref, dv_ref, bounded is True, begin, stop - begin)
                count = lax.fori_loop(0, (stop - begin) * group, body, count)
        return [accumulator[...] for accumulator in accumulators]

    sizes = {"k": refs.k.shape[3], "v": refs.v.shape[3]}
    found = pl.run_scoped(gradients, *(common.accumulator(WARPGROUP_ROWS, sizes[name]) for name in wanted))
    # Computed again rather than kept in registers.
    batch_index, first, key_head, *_ = tile(lax.optimization_barrier(lax.axis_index("cta")))
    first = first + part * WARPGROUP_ROWS
    staging = {"k": k_smem, "v": v_smem}
    if config.split:  # both warpgroups have read both until here
        plgpu.barrier_arrive(refs.done)
        plgpu.barrier_wait(refs.done)
    for name, value in zip(wanted, found, strict=True):
        staging[name][...] = (value * options.scale if name == "k" else value).astype(dtype)
    plgpu.commit_smem()
    place = (batch_index, pl.ds(first, WARPGROUP_ROWS), key_head)
    for name in wanted:
        plgpu.copy_smem_to_gmem(staging[name], (refs.dk if name == "k" else refs.dv).at[place])
    plgpu.wait_smem_to_gmem(0)
