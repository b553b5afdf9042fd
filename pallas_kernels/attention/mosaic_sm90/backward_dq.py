"""The backward pass in the queries: dq = scale · dS k, with P and dS computed again from the log-sum-exp.

A thread block takes a tile of 128 queries of one head, the heaviest tiles first: one warpgroup loads, two compute 64
queries each and take only the blocks of keys that these see. With two buffers there are as many thread blocks as
multiprocessors, each with several tiles in turn, and the next tile's queries are loaded while one is computed: for
documents so short that a tile has a few blocks only. With δ = rowsum(dout ∘ out): P = exp(logits − lse),
dS = P ∘ (dout vᵀ − δ) (FlashAttention-2, arXiv 2307.08691, algorithm 2).
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
from pallas_kernels.attention.mosaic_sm90.common import LOG2E, ROWS, WARPGROUP_ROWS, broadcast_rows
from pallas_kernels.attention.mosaic_sm90.config import CONSUMER_REGISTERS, PRODUCER_REGISTERS, DqConfig
from pallas_kernels.attention.mosaic_sm90.rows import VisibleColumns
from pallas_kernels.attention.mosaic_sm90.tiles import Schedule, leave
from pallas_kernels.attention.ranges import TILE


@functools.partial(jax.jit, static_argnames=("keys", "options", "config", "ctas", "interpret"))
def backward_dq(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    mask: Mask,
    seed: Array | None,
    *,
    keys: int,
    options: Options,
    config: DqConfig,
    ctas: int,
    interpret: Any = None,
) -> Array:
    """The gradient of q.

    Args:
        q: queries [B, S, H, D], bfloat16 or float16.
        k: keys [B, T, K, D].
        v: values [B, T, K, Dv].
        dout: cotangent of the output, [B, S, H, Dv] in q's dtype.
        lse: −log-sum-exp / scale, with a soft cap −log-sum-exp · log₂ e; float32 [B, H, S padded to tiles].
        delta: −(rowsum(dout ∘ out) − dlse), of lse's shape.
        mask: its ranges and offset.
        seed: uint32 [2].
        keys: T; rows of k and v behind it are padding.
        options: of the call.
        config: block sizes.
        ctas: the multiprocessors.
        interpret: parameters of Mosaic's interpreter; None compiles.
    """
    batch, length, heads, size = q.shape
    value_size, count = v.shape[3], pl.cdiv(length, TILE)
    total, buffers, posted = batch * count * heads, config.buffers, mask.ranges is not None
    ctas = total if buffers == 1 else min(ctas, total)
    key_tile, value_tile = (common.transforms(columns, config.block_kv) for columns in (size, value_size))
    scratch = {
        "q_smem": plgpu.SMEM((buffers, 2, WARPGROUP_ROWS, size), q.dtype, transforms=key_tile),
        "do_smem": plgpu.SMEM((buffers, 2, WARPGROUP_ROWS, value_size), q.dtype, transforms=value_tile),
        "k_smem": plgpu.SMEM((config.stages, config.block_kv, size), q.dtype, transforms=key_tile),
        "v_smem": plgpu.SMEM((config.stages, config.block_kv, value_size), q.dtype, transforms=value_tile),
        "statistics": plgpu.SMEM((buffers, 2, 2, WARPGROUP_ROWS), jnp.float32),
        # q, dout, lse and delta of each warpgroup's half of a tile.
        "q_full": plgpu.Barrier(num_barriers=2 * buffers, num_arrivals=4 + Schedule.ARRIVALS * posted),
        "q_free": plgpu.Barrier(num_barriers=buffers, num_arrivals=2),
        "full": plgpu.Barrier(num_barriers=config.stages, num_arrivals=2),
        "free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=2),
    }
    if posted:
        scratch |= Schedule.shared(buffers, 2)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, "seed": seed}
    inputs |= common.mask_inputs(mask, options, "q")
    outputs = {"dq": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    body = functools.partial(_kernel, keys=keys, ctas=ctas, options=options, config=config)
    [dq] = common.launch(body, inputs, outputs, scratch, ctas, "attention_backward_dq", interpret)
    return dq


def _kernel(refs, *, keys: int, ctas: int, options: Options, config: DqConfig):
    batch, length, heads, _ = refs.q.shape
    group = heads // refs.k.shape[2]
    rows = VisibleColumns(refs.start, refs.end, refs.offset, length, keys, options)
    warpgroup = lax.axis_index("warpgroup")
    schedule = Schedule(
        refs,
        rows,
        batch,
        heads,
        ctas,
        config.block_kv,
        size=TILE // config.heads,
        members=config.heads,
        slots=config.buffers,
    )

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        schedule.each(functools.partial(_load, refs, schedule, group=group, config=config))

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        schedule.each(functools.partial(_compute, refs, schedule, warpgroup=warpgroup, options=options, config=config))


def _load(refs, schedule: Schedule, turn, taken, *, group: int, config: DqConfig):
    """The loading warpgroup: the queries and their cotangents, then keys and values, the last block first."""
    block, stages, buffers = config.block_kv, config.stages, jnp.int32(config.buffers)
    tile = schedule.tile(turn)
    row, _, head, low, _, _, high, *_ = tile
    buffer = lax.rem(turn, buffers)
    # Both warpgroups have stored their gradients, which are staged where the queries were. The first round of buffers
    # starts empty, as do the stages below.
    pl.when(turn >= buffers)(lambda: plgpu.barrier_wait(refs.q_free.at[buffer]))
    for part in range(2):
        full = refs.q_full.at[buffer * 2 + part]
        todo = schedule.post(turn, tile, part, full)
        queries = pl.ds(todo.first, WARPGROUP_ROWS)
        for array, smem in ((refs.q, refs.q_smem), (refs.dout, refs.do_smem)):
            plgpu.copy_gmem_to_smem(array.at[todo.row, queries, todo.head], smem.at[buffer, part], full)
        for number, array in enumerate((refs.lse, refs.delta)):
            place = refs.statistics.at[buffer, part, number]
            plgpu.copy_gmem_to_smem(array.at[todo.row, todo.head, queries], place, full)

    def load_block(step, taken):
        slot = lax.rem(taken, jnp.int32(stages))
        place = (row, pl.ds((high - 1 - step) * block, block), lax.div(head, jnp.int32(group)))
        pl.when(taken >= stages)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        for array, smem in ((refs.k, refs.k_smem), (refs.v, refs.v_smem)):
            plgpu.copy_gmem_to_smem(array.at[place], smem.at[slot], refs.full.at[slot])
        return taken + 1

    return lax.fori_loop(0, high - low, load_block, taken)


def _compute(refs, schedule: Schedule, turn, taken, *, warpgroup, options: Options, config: DqConfig):
    """A computing warpgroup: the gradient of its 64 queries; returns how many blocks it has taken in all.

    Of a block both logits = q kᵀ and dP = dout vᵀ are in flight at once; P is computed while dP is, and dq's product,
    from dS in registers, is waited for at the end of the block.
    """
    block, stages, dtype = config.block_kv, jnp.int32(config.stages), refs.q.dtype
    buffer = lax.rem(turn, jnp.int32(config.buffers))
    q_smem, do_smem = refs.q_smem.at[buffer, warpgroup], refs.do_smem.at[buffer, warpgroup]
    plgpu.barrier_wait(refs.q_full.at[buffer * 2 + warpgroup])
    work, scarce = schedule.work(turn, warpgroup), refs.q.shape[3] > 128 or options.dropout_rate > 0

    def again():
        """The tile's numbers: computed again where registers are scarce."""
        return schedule.work(lax.optimization_barrier(turn), warpgroup) if scarce else work

    statistics = refs.statistics.at[buffer, warpgroup]
    rows, bounds = schedule.rows, schedule.bounds(turn, warpgroup)
    lse, delta = (compat.mosaic_load(statistics.at[number], ROWS) for number in range(2))
    if options.logits_soft_cap is None:
        lse = lse * (options.scale * LOG2E)
    taken = leave(again().behind, taken, stages, ((refs.full, refs.free),))  # loaded for the other warpgroup alone

    def release(index):
        plgpu.barrier_arrive(refs.free.at[lax.rem(taken + index, stages)])

    def gradient(dq_ref):
        def step(masked, index, _):
            slot = lax.rem(taken + index, stages)
            k_smem, v_smem = refs.k_smem.at[slot], refs.v_smem.at[slot]
            shape = (WARPGROUP_ROWS, block)

            def products(s_ref, dp_ref):
                plgpu.barrier_wait(refs.full.at[slot])
                plgpu.wgmma(s_ref, q_smem, k_smem.T)
                plgpu.wgmma(dp_ref, do_smem, v_smem.T)
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)  # dP stays in flight
                s, factor, slope = soft_cap.capped(s, options, interpreted=refs.interpreted)
                here = again()
                key = (here.high - 1 - index) * block
                if masked:
                    s = rows.mask(s, here.row, here.first, key, bounds)
                p = jnp.exp2(s * factor + broadcast_rows(lse, shape))
                if options.dropout_rate:  # dropped weights get a minus, which needs no registers
                    number = here.row * refs.q.shape[2] + here.head
                    keep = common.kept(shape, refs.seed, number, here.first, key, options, False)
                    p = jnp.where(keep, p, -p)
                p = p if slope is None else p * slope
                dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                if options.dropout_rate:  # the sign has done its work
                    dp = jnp.where(p > 0, dp * (1 / (1 - options.dropout_rate)), 0.0)
                    p = jnp.maximum(p, -p)
                return (p * (dp + broadcast_rows(delta, shape))).astype(dtype)

            ds = pl.run_scoped(products, common.accumulator(*shape), common.accumulator(*shape))
            plgpu.wgmma(dq_ref, ds, k_smem)
            plgpu.wgmma_wait(0)  # the product reads the block's keys, so they are not free before it is done
            release(index)

        plain, masked = (functools.partial(step, masked) for masked in (False, True))
        here = again()
        lax.fori_loop(0, here.high - here.outer, masked, None)
        here = again()
        lax.fori_loop(here.high - here.outer, here.high - here.inner, plain, None)
        if rows.bounded_below:
            here = again()
            lax.fori_loop(here.high - here.inner, here.high - here.low, masked, None)
        return dq_ref[...]

    dq = pl.run_scoped(gradient, common.accumulator(WARPGROUP_ROWS, refs.q.shape[3]))
    here = again()
    taken = leave(here.before, taken + (here.high - here.low), stages, ((refs.full, refs.free),))
    batch_index, first, head, *_ = schedule.work(lax.optimization_barrier(turn), warpgroup)  # rather than keep them
    q_smem[...] = (dq * options.scale).astype(dtype)  # all products with these queries are done: dq is in registers
    plgpu.commit_smem()  # plain stores become visible to the copy engine
    plgpu.copy_smem_to_gmem(q_smem, refs.dq.at[batch_index, pl.ds(first, WARPGROUP_ROWS), head])
    # The buffer is free once the store has read it; a kernel that ends here waits until it has written, too.
    plgpu.wait_smem_to_gmem(0, wait_read_only=config.buffers > 1)
    plgpu.barrier_arrive(refs.q_free.at[buffer])
    return taken
