"""The backward pass in the keys and values: dv = Pᵀ dout, dk = scale · dSᵀ q.

A thread block takes a tile of keys of one key head, the heaviest tiles first. One warpgroup loads; two hold
accumulators and run over the queries of every query head that shares the key head, so that no gradient of a single
query head is ever in memory and the order of all sums is fixed. Everything is transposed: rows are keys, columns
queries. A tile is 128 keys, 64 to a warpgroup; where both accumulators of a warpgroup would not fit into its registers
it is 64 keys, of which one warpgroup computes dk and the other dv. `buffers` is as in `backward_dq`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.attention.call import Mask, Options
from pallas_kernels.attention.mosaic_sm90 import common, soft_cap
from pallas_kernels.attention.mosaic_sm90.common import COLUMNS, WARPGROUP_ROWS, broadcast_columns
from pallas_kernels.attention.mosaic_sm90.config import CONSUMER_REGISTERS, PRODUCER_REGISTERS, DkvConfig
from pallas_kernels.attention.mosaic_sm90.rows import VisibleColumns
from pallas_kernels.attention.mosaic_sm90.tiles import Schedule, leave
from pallas_kernels.attention.ranges import TILE


@functools.partial(jax.jit, static_argnames=("options", "config", "ctas", "interpret"))
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
    ctas: int,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """The gradients of k and v; arguments as in `backward_dq`."""
    batch, keys, key_heads, size = k.shape
    value_size, count = v.shape[3], pl.cdiv(keys, TILE)
    parts, stages, buffers, block = 1 if config.split else 2, config.stages, config.buffers, config.block_q
    total, posted = batch * count * key_heads * (2 // parts), mask.ranges is not None
    ctas = total if buffers == 1 else min(ctas, total)
    key_tile, value_tile = (common.transforms(columns, block) for columns in (size, value_size))
    scratch = {
        "k_smem": plgpu.SMEM((buffers, parts, WARPGROUP_ROWS, size), q.dtype, transforms=key_tile),
        "v_smem": plgpu.SMEM((buffers, parts, WARPGROUP_ROWS, value_size), q.dtype, transforms=value_tile),
        "q_smem": plgpu.SMEM((stages, block, size), q.dtype, transforms=key_tile),
        "do_smem": plgpu.SMEM((stages, block, value_size), q.dtype, transforms=value_tile),
        "statistics": plgpu.SMEM((stages, 2, block), jnp.float32),
        # k and v of each part of a tile; then q, dout, lse and delta of each block.
        "kv_full": plgpu.Barrier(num_barriers=parts * buffers, num_arrivals=2 + Schedule.ARRIVALS * posted),
        "kv_free": plgpu.Barrier(num_barriers=buffers, num_arrivals=2),
        "full": plgpu.Barrier(num_barriers=stages, num_arrivals=4),
        "free": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        "done": plgpu.Barrier(num_arrivals=2),
    }
    if posted:
        scratch |= Schedule.shared(buffers, parts)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, "seed": seed}
    inputs |= common.mask_inputs(mask, options, "k")
    outputs = {"dk": jax.ShapeDtypeStruct(k.shape, k.dtype), "dv": jax.ShapeDtypeStruct(v.shape, v.dtype)}
    body = functools.partial(_kernel, ctas=ctas, options=options, config=config)
    dk, dv = common.launch(body, inputs, outputs, scratch, ctas, "attention_backward_dkv", interpret)
    return dk, dv


def _kernel(refs, *, ctas: int, options: Options, config: DkvConfig):
    batch, keys, key_heads, _ = refs.k.shape
    group = refs.q.shape[2] // key_heads
    rows = VisibleColumns(refs.start, refs.end, refs.offset, keys, refs.q.shape[1], options, transposed=True)
    warpgroup, parts = lax.axis_index("warpgroup"), 1 if config.split else 2
    schedule = Schedule(
        refs,
        rows,
        batch,
        key_heads,
        ctas,
        config.block_q,
        size=parts * WARPGROUP_ROWS,
        whole=config.split,
        slots=config.buffers,
    )

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        schedule.each(functools.partial(_load, refs, schedule, group=group, parts=parts, config=config))

    def compute(part, wanted):
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        common_arguments = {"part": part, "group": group, "wanted": wanted, "options": options, "config": config}
        schedule.each(functools.partial(_compute, refs, schedule, **common_arguments))

    if config.split:
        pl.when(warpgroup == 0)(lambda: compute(0, "k"))
        pl.when(warpgroup == 1)(lambda: compute(0, "v"))
    else:
        pl.when(warpgroup < 2)(lambda: compute(warpgroup, "kv"))


def _load(refs, schedule: Schedule, turn, taken, *, group: int, parts: int, config: DkvConfig):
    """The loading warpgroup: the tile's keys and values, then the queries that see them, head by head."""
    block, stages, buffers = config.block_q, config.stages, jnp.int32(config.buffers)
    tile = schedule.tile(turn)
    row, _, key_head, low, _, _, high, *_ = tile
    buffer = lax.rem(turn, buffers)
    # Both warpgroups have stored their gradients, which are staged where keys and values were. The first round of
    # buffers starts empty, as do the stages below.
    pl.when(turn >= buffers)(lambda: plgpu.barrier_wait(refs.kv_free.at[buffer]))
    for part in range(parts):
        full = refs.kv_full.at[buffer * parts + part]
        todo = schedule.post(turn, tile, part, full)
        place = (todo.row, pl.ds(todo.first, WARPGROUP_ROWS), todo.head)
        plgpu.copy_gmem_to_smem(refs.k.at[place], refs.k_smem.at[buffer, part], full)
        plgpu.copy_gmem_to_smem(refs.v.at[place], refs.v_smem.at[buffer, part], full)

    def load_block(head, index, taken):
        slot = lax.rem(taken, jnp.int32(stages))
        queries = pl.ds(index * block, block)
        pl.when(taken >= stages)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        for array, smem in ((refs.q, refs.q_smem), (refs.dout, refs.do_smem)):
            plgpu.copy_gmem_to_smem(array.at[row, queries, head], smem.at[slot], refs.full.at[slot])
        for number, array in enumerate((refs.lse, refs.delta)):
            place = refs.statistics.at[slot, number]
            plgpu.copy_gmem_to_smem(array.at[row, head, queries], place, refs.full.at[slot])
        return taken + 1

    def load_head(member, taken):
        return lax.fori_loop(low, high, functools.partial(load_block, key_head * group + member), taken)

    return lax.fori_loop(0, group, load_head, taken)


def _compute(refs, schedule: Schedule, turn, taken, *, part, group: int, wanted: str, options: Options, config):
    """A computing warpgroup: the gradients of 64 keys, values or both; returns the blocks taken in all.

    Of a block Sᵀ = k qᵀ and dPᵀ = v doutᵀ are in flight at once; P is computed while dPᵀ is, dv's product runs while dS
    is computed. The accumulators of dk and dv stay in registers over all blocks and query heads.
    """
    block, stages, dtype = config.block_q, jnp.int32(config.stages), refs.q.dtype
    buffer, parts = lax.rem(turn, jnp.int32(config.buffers)), 1 if config.split else 2
    k_smem, v_smem = refs.k_smem.at[buffer, part], refs.v_smem.at[buffer, part]
    plgpu.barrier_wait(refs.kv_full.at[buffer * parts + part])

    rows, bounds = schedule.rows, schedule.bounds(turn, part)

    def again():
        """The tile's numbers, computed again rather than kept in registers."""
        return schedule.work(lax.optimization_barrier(turn), part)

    def step(dk_ref, dv_ref, masked, member, index, taken):
        slot, query = lax.rem(taken, stages), index * block
        q_smem, do_smem = refs.q_smem.at[slot], refs.do_smem.at[slot]

        def signed(p):
            """Weights with a minus where dropped: the bits are made once and need no registers."""
            here = again()
            number = here.row * refs.q.shape[2] + here.head * group + member
            keep = common.kept(p.shape, refs.seed, number, here.first, query, options, True)
            return jnp.where(keep, p, -p)

        shape = (WARPGROUP_ROWS, block)

        def columns(index):
            return broadcast_columns(compat.mosaic_load(refs.statistics.at[slot, index], COLUMNS), shape)

        def weights(s_ref, pending):
            s, factor, slope = soft_cap.capped(
                plgpu.wgmma_accumulator_load(s_ref, wait_n=pending), options, interpreted=refs.interpreted
            )
            if masked:
                here = again()
                s = rows.mask(s, here.row, here.first, query, bounds)
            p = jnp.exp2(s * factor if options.logits_soft_cap is None else s * factor + columns(0))
            p = signed(p) if options.dropout_rate else p
            return p, p if slope is None else p * slope  # at once, so that the slope need not be kept

        def add_values(p):
            if options.dropout_rate:
                p = jnp.maximum(p, 0.0) * (1 / (1 - options.dropout_rate))
            plgpu.wgmma(dv_ref, p.astype(dtype), do_smem)

        def products(s_ref, dp_ref=None):
            plgpu.barrier_wait(refs.full.at[slot])
            # −lse and −δ are where the accumulators start from, so that subtracting them costs nothing. Not through a
            # cap, which is not linear, nor δ with dropout, whose factor comes before it.
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
            p, sloped = weights(s_ref, 1)  # dPᵀ stays in flight
            if dv_ref is not None:
                add_values(p)
            # Products end in the order of their issue: dv's, the one behind dPᵀ, stays in flight.
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0 if dv_ref is None else 1)
            if options.dropout_rate:
                dp = jnp.where(sloped > 0, dp * (1 / (1 - options.dropout_rate)), 0.0) + columns(1)
                sloped = jnp.maximum(sloped, -sloped)
            plgpu.wgmma(dk_ref, (sloped * dp).astype(dtype), q_smem)

        accumulator = common.accumulator(*shape)
        pl.run_scoped(products, *[accumulator] * (1 if dk_ref is None else 2))
        plgpu.wgmma_wait(0)  # dk's and dv's products read the block's queries and cotangents
        plgpu.barrier_arrive(refs.free.at[slot])
        return taken + 1

    def gradients(*accumulators):
        dk_ref = accumulators[0] if "k" in wanted else None
        dv_ref = accumulators[-1] if "v" in wanted else None

        def of_head(member, taken):
            # Blocks that are loaded for the other warpgroup's keys alone, before and behind this one's.
            taken = leave(again().before, taken, stages, ((refs.full, refs.free),))
            for bounded, begin, stop in (
                (rows.bounded_below, "low", "inner"),
                (None, "inner", "outer"),
                (rows.bounded_above, "outer", "high"),
            ):
                if bounded is not False:
                    here = again()
                    body = functools.partial(step, dk_ref, dv_ref, bounded is True, member)
                    taken = lax.fori_loop(getattr(here, begin), getattr(here, stop), body, taken)
            return leave(again().behind, taken, stages, ((refs.full, refs.free),))

        count = lax.fori_loop(0, group, of_head, taken)
        return [count, *(accumulator[...] for accumulator in accumulators)]

    sizes = {"k": refs.k.shape[3], "v": refs.v.shape[3]}
    taken, *sums = pl.run_scoped(gradients, *(common.accumulator(WARPGROUP_ROWS, sizes[name]) for name in wanted))
    batch_index, first, key_head, *_ = again()
    staging = {"k": k_smem, "v": v_smem}
    if config.split:  # they share keys and values: neither may stage its gradient there before both have read them
        plgpu.barrier_arrive(refs.done)
        plgpu.barrier_wait(refs.done)
    for name, value in zip(wanted, sums, strict=True):
        staging[name][...] = (value * options.scale if name == "k" else value).astype(dtype)
    plgpu.commit_smem()  # plain stores become visible to the copy engine
    place = (batch_index, pl.ds(first, WARPGROUP_ROWS), key_head)
    for name in wanted:
        plgpu.copy_smem_to_gmem(staging[name], (refs.dk if name == "k" else refs.dv).at[place])
    # The buffer is free once the stores have read it; a kernel that ends here waits until they have written, too.
    plgpu.wait_smem_to_gmem(0, wait_read_only=config.buffers > 1)
    plgpu.barrier_arrive(refs.kv_free.at[buffer])
    return taken
