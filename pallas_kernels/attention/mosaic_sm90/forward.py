"""The forward pass.

A persistent kernel: each thread block takes tiles of 128 queries of one head, heaviest first. One warpgroup loads
(TMA), two compute 64 queries each. With `pingpong` one multiplies while the other takes its softmax: they wait for each
other's turn, and so take equally many blocks; without it each takes only the blocks that its own queries see. Within a
warpgroup the product with the values of one block runs while the softmax of the next is taken (FlashAttention-3, arXiv
2407.08608, sections 3.1 and 3.2).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.call import Mask, Options
from pallas_kernels.attention.mosaic_sm90 import common, soft_cap
from pallas_kernels.attention.mosaic_sm90.common import LOG2E, LOWEST, WARPGROUP_ROWS, broadcast_rows
from pallas_kernels.attention.mosaic_sm90.config import CONSUMER_REGISTERS, PRODUCER_REGISTERS, ForwardConfig
from pallas_kernels.attention.mosaic_sm90.rows import VisibleColumns
from pallas_kernels.attention.mosaic_sm90.tiles import Schedule, leave
from pallas_kernels.attention.ranges import TILE


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("keys", "options", "config", "ctas", "interpret"))
def forward(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    sinks: Array | None,
    seed: Array | None,
    *,
    keys: int,
    options: Options,
    config: ForwardConfig,
    ctas: int,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """Output [B, S, H, Dv] and log-sum-exp [B, H, S padded to tiles].

    Args:
        q: queries [B, S, H, D], bfloat16 or float16.
        k: keys [B, T, K, D].
        v: values [B, T, K, Dv].
        mask: its ranges and offset.
        sinks: float32 [H].
        seed: uint32 [2].
        keys: T; rows of k and v behind it are padding.
        options: of the call.
        config: block sizes.
        ctas: thread blocks: the multiprocessors.
        interpret: parameters of Mosaic's interpreter; None compiles.
    """
    batch, length, heads, size = q.shape
    value_size, count = v.shape[3], pl.cdiv(length, TILE)
    total, posted = batch * count * heads, mask.ranges is not None
    ctas = min(ctas, total)
    key_tile, value_tile = (common.transforms(columns, config.block_kv) for columns in (size, value_size))
    scratch = {
        "q_smem": plgpu.SMEM((config.buffers, 2, WARPGROUP_ROWS, size), q.dtype, transforms=key_tile),
        "k_smem": plgpu.SMEM((config.stages, config.block_kv, size), q.dtype, transforms=key_tile),
        "v_smem": plgpu.SMEM((config.stages, config.block_kv, value_size), q.dtype, transforms=value_tile),
        # A barrier for each warpgroup's half of a tile: neither waits for the other's queries.
        "q_full": plgpu.Barrier(num_barriers=2 * config.buffers, num_arrivals=1 + Schedule.ARRIVALS * posted),
        "q_free": plgpu.Barrier(num_barriers=config.buffers, num_arrivals=2),
        # Keys and values have rings of their own: a block's keys are free a whole block before its values.
        "k_full": plgpu.Barrier(num_barriers=config.stages),
        "v_full": plgpu.Barrier(num_barriers=config.stages),
        "k_free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=2),
        "v_free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=2),
        "turn": plgpu.Barrier(num_barriers=2),
        "o_smem": plgpu.SMEM((2, WARPGROUP_ROWS, value_size), q.dtype, transforms=value_tile)
        if config.own_output
        else None,
    }
    if posted:
        scratch |= Schedule.shared(config.buffers + 1, 2)
    outputs = {
        "out": jax.ShapeDtypeStruct((batch, length, heads, value_size), q.dtype),
        "lse": jax.ShapeDtypeStruct((batch, heads, count * TILE), jnp.float32),
    }
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks, "seed": seed, **common.mask_inputs(mask, options, "q")}
    body = functools.partial(_kernel, keys=keys, ctas=ctas, options=options, config=config)
    out, lse = common.launch(body, inputs, outputs, scratch, ctas, "attention_forward", interpret)
    return out, lse


def _kernel(refs, *, keys: int, ctas: int, options: Options, config: ForwardConfig):
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
        whole=config.pingpong,
        slots=config.buffers + 1,  # they are read after the queries are given back
    )

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _load(refs, schedule, group, config)

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        if config.pingpong:  # the first turn is warpgroup 0's
            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
        schedule.each(functools.partial(_compute, refs, schedule, warpgroup=warpgroup, options=options, config=config))
        plgpu.wait_smem_to_gmem(0)  # shared memory must outlive the last tile's store


def _load(refs, schedule: Schedule, group: int, config: ForwardConfig):
    """The loading warpgroup: queries of each tile, then its blocks of keys and values, the last block first.

    It runs ahead by `config.stages` blocks and `config.buffers` tiles. Causality masks a tile's last blocks: these come
    first, and the loop over unmasked blocks ends at the start of the row.
    """
    block, stages, buffers = config.block_kv, config.stages, jnp.int32(config.buffers)

    def load_tile(turn, taken):
        tile = schedule.tile(turn)
        row, _, head, low, _, _, high, *_ = tile
        buffer = lax.rem(turn, buffers)
        # Both warpgroups are done with the buffer's last queries (and with the output staged there). The first round of
        # buffers starts empty, as do the rings below.
        pl.when(turn >= buffers)(lambda: plgpu.barrier_wait(refs.q_free.at[buffer]))
        for part in range(2):
            full = refs.q_full.at[buffer * 2 + part]
            todo = schedule.post(turn, tile, part, full)
            place = (todo.row, pl.ds(todo.first, WARPGROUP_ROWS), todo.head)
            plgpu.copy_gmem_to_smem(refs.q.at[place], refs.q_smem.at[buffer, part], full)

        def load_block(step, taken):
            slot = lax.rem(taken, jnp.int32(stages))
            place = (row, pl.ds((high - 1 - step) * block, block), lax.div(head, jnp.int32(group)))
            for array, smem, full, free in (
                (refs.k, refs.k_smem, refs.k_full, refs.k_free),
                (refs.v, refs.v_smem, refs.v_full, refs.v_free),
            ):
                pl.when(taken >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(array.at[place], smem.at[slot], full.at[slot])
            return taken + 1

        return lax.fori_loop(0, high - low, load_block, taken)

    schedule.each(load_tile)


def _compute(refs, schedule: Schedule, turn, taken, *, warpgroup, options: Options, config: ForwardConfig):
    """A computing warpgroup's tile, by the online softmax; returns how many blocks it has taken in all.

    In flight while the softmax of a block is taken: the product of the block before with its values, and the other
    warpgroup's products.
    """
    block, stages, dtype = config.block_kv, jnp.int32(config.stages), refs.q.dtype
    value_size = refs.v.shape[3]
    buffer = lax.rem(turn, jnp.int32(config.buffers))
    q_smem = refs.q_smem.at[buffer, warpgroup]
    plgpu.barrier_wait(refs.q_full.at[buffer * 2 + warpgroup])
    work, scarce = schedule.work(turn, warpgroup), value_size > 192

    def again():
        """The tile's numbers: computed again where registers are scarce."""
        return schedule.work(lax.optimization_barrier(turn), warpgroup) if scarce else work

    rows, bounds = schedule.rows, schedule.bounds(turn, warpgroup)

    # Blocks behind those that this warpgroup's rows see are loaded for the other one.
    rings = ((refs.k_full, refs.k_free), (refs.v_full, refs.v_free))
    taken = leave(again().behind, taken, stages, rings)

    def multiply_keys(s_ref, slot):
        plgpu.barrier_wait(refs.k_full.at[slot])
        if config.pingpong:  # until the other warpgroup has issued its products and turns to its softmax
            plgpu.barrier_wait(refs.turn.at[warpgroup])
        plgpu.wgmma(s_ref, q_smem, refs.k_smem.at[slot].T)

    def multiply_values(acc_ref, p, slot):
        plgpu.barrier_wait(refs.v_full.at[slot])
        plgpu.wgmma(acc_ref, p, refs.v_smem.at[slot])

    def pass_turn():
        if config.pingpong:
            plgpu.barrier_arrive(refs.turn.at[1 - warpgroup])

    def release_keys(index, slot):
        # The logits are in registers, so the product that read the keys is done; its last one read the queries too.
        plgpu.barrier_arrive(refs.k_free.at[slot])
        if config.own_output:  # as early as it can be: the other warpgroup may already wait for its next queries
            pl.when(index == work.high - 1 - work.low)(lambda: plgpu.barrier_arrive(refs.q_free.at[buffer]))

    bounded = soft_cap.bounded(dtype, options)

    def softmax(s, top, index, masked):
        """A block's weights and their sums, the factor of the sums so far, and the greatest logit."""
        s, factor, _ = soft_cap.capped(s, options, interpreted=refs.interpreted)
        here = again()
        key = (here.high - 1 - index) * block
        if masked:
            s = rows.mask(s, here.row, here.first, key, bounds)
        new_top = top if bounded else jnp.maximum(top, jnp.max(s, axis=1) * factor)
        p = jnp.exp2(s * factor if bounded else s * factor - broadcast_rows(new_top, s.shape))
        total = jnp.sum(p, axis=1)
        if options.dropout_rate:
            number = here.row * refs.q.shape[2] + here.head
            p = jnp.where(common.kept(s.shape, refs.seed, number, here.first, key, options, False), p, 0.0)
        return p, total, None if bounded else jnp.exp2(top - new_top), new_top

    s_shape, acc_shape = (WARPGROUP_ROWS, block), (WARPGROUP_ROWS, value_size)
    s_type, acc_type = (common.accumulator(*shape) for shape in (s_shape, acc_shape))

    def first_block():
        slot = lax.rem(taken, stages)

        def logits(s_ref):
            # No turn is taken: with one product and nothing to overlap it with, order does not matter yet.
            plgpu.barrier_wait(refs.k_full.at[slot])
            plgpu.wgmma(s_ref, q_smem, refs.k_smem.at[slot].T)
            return s_ref[...]

        s = pl.run_scoped(logits, s_type)
        release_keys(0, slot)
        p, total, _, top = softmax(s, common.full_rows(0.0 if bounded else LOWEST), 0, True)
        return common.zeros(acc_shape), top, total, p.astype(dtype), taken + 1

    def later_block(masked, index, carry):
        """The product with the keys of this block and with the values of the one before."""
        acc, top, total, p, taken = carry
        slot, last = lax.rem(taken, stages), lax.rem(taken + (stages - 1), stages)

        def products(s_ref, acc_ref):
            acc_ref[...] = acc
            multiply_keys(s_ref, slot)
            multiply_values(acc_ref, p, last)
            pass_turn()
            # Products end in the order of their issue: with one left in flight, that with the values, s is there.
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
            release_keys(index, slot)
            new_p, summed, alpha, new_top = softmax(s, top, index, masked)
            # Only now, after the softmax: the product with the values ran beside it.
            new_acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
            plgpu.barrier_arrive(refs.v_free.at[last])
            if alpha is None:
                return new_acc, new_top, total + summed, new_p.astype(dtype)
            return new_acc * broadcast_rows(alpha, acc.shape), new_top, total * alpha + summed, new_p.astype(dtype)

        return *pl.run_scoped(products, s_type, acc_type), taken + 1

    # From the last block down: the first one is taken as masked, [outer, high) are masked, [inner, outer) are not,
    # and [low, inner) are masked where rows do not see the first columns.
    carry = first_block()
    plain, masked = (functools.partial(later_block, masked) for masked in (False, True))
    here = again()
    carry = lax.fori_loop(1, here.high - here.outer, masked, carry)
    here = again()
    carry = lax.fori_loop(jnp.maximum(here.high - here.outer, 1), here.high - here.inner, plain, carry)
    if rows.bounded_below:
        here = again()
        carry = lax.fori_loop(jnp.maximum(here.high - here.inner, 1), here.high - here.low, masked, carry)
    # The last block's values are still to be multiplied with.
    acc, top, total, p, taken = carry
    last = lax.rem(taken + (stages - 1), stages)
    acc: Any = pl.run_state(lambda acc_ref: multiply_values(acc_ref, p, last))(common.accumulator_from(acc))
    plgpu.barrier_arrive(refs.v_free.at[last])
    taken = leave(again().before, taken, stages, rings)

    batch_index, first, head, *_ = schedule.work(lax.optimization_barrier(turn), warpgroup)  # rather than keep them
    place = pl.ds(first, WARPGROUP_ROWS)
    factor, lse = _finish(top, total, None if refs.sinks is None else refs.sinks[head], options)
    plgpu.wait_smem_to_gmem(0)  # the last tile's store has read the staging buffer
    o_smem = refs.o_smem.at[warpgroup] if config.own_output else q_smem
    o_smem[...] = (acc * broadcast_rows(factor, acc.shape)).astype(dtype)
    refs.lse[batch_index, head, place] = lse
    plgpu.commit_smem()  # plain stores become visible to the copy engine
    plgpu.copy_smem_to_gmem(o_smem, refs.out.at[batch_index, place, head])
    if not config.own_output:  # the queries' buffer is staging too: free once the store has read it
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(refs.q_free.at[buffer])
    return taken


def _finish(top, total, sink, options: Options):
    """The factor of the weighted values, and the log-sum-exp; 0 and inf for a row that saw nothing."""
    if sink is None:
        empty = total == 0.0
        factor = jnp.where(empty, 0.0, 1.0 / total)
        lse = jnp.where(empty, jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))
    else:
        sink = sink * LOG2E
        new_top = jnp.maximum(top, sink)
        alpha = jnp.exp2(top - new_top)
        total = total * alpha + jnp.exp2(sink - new_top)
        factor = alpha / total
        lse = (new_top + jnp.log2(total)) * (1 / LOG2E)
    return factor / (1.0 - options.dropout_rate) if options.dropout_rate else factor, lse
