"""The forward pass.

A persistent kernel: each thread block takes tiles of 128 queries of one head, heaviest first. One warpgroup loads
(TMA); two compute 64 queries each. While one multiplies, the other takes its softmax: a barrier that both arrive at
keeps them out of phase (FlashAttention-3, arXiv 2407.08608, section 3.1).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_sm90 import common
from pallas_kernels.attention.mosaic_sm90.common import LOG2E, LOWEST, WARPGROUP_ROWS
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.ranges import TILE, SegmentRanges


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    block_kv: int = 128
    stages: int = 2
    overlap: bool = False
    pingpong: bool = True
    ctas: int = 132
    HAS_OVERLAP = True


@functools.partial(jax.jit, static_argnames=("options", "config", "interpret"))
def forward(
    q: Array,
    k: Array,
    v: Array,
    ranges: SegmentRanges | None,
    query_offset: Array | None,
    sinks: Array | None,
    seed: Array | None,
    *,
    options: Options,
    config: ForwardConfig,
    interpret: Any = None,
) -> tuple[Array, Array]:
    batch, length, heads, size = q.shape
    value_size = v.shape[3]
    tiles = pl.cdiv(length, TILE)
    total = batch * tiles * heads
    ctas = min(config.ctas, total)
    inputs = {"q": q, "k": k, "v": v}
    if ranges is not None:
        inputs |= {"start": common.padded_rows(ranges.k_start), "end": common.padded_rows(ranges.k_end)}
        inputs |= {"order": ranges.q_order}
    if query_offset is not None:
        inputs |= {"offset": query_offset}
    if sinks is not None:
        inputs |= {"sinks": sinks}
    names = tuple(inputs)
    dtype = q.dtype
    tile = lambda columns: common.transforms(columns)
    separate = value_size <= 128 and size <= 128
    scratch = {
        "q_smem": plgpu.SMEM((2, WARPGROUP_ROWS, size), dtype, transforms=tile(size)),
        "k_smem": plgpu.SMEM((config.stages, config.block_kv, size), dtype, transforms=tile(size)),
        "v_smem": plgpu.SMEM((config.stages, config.block_kv, value_size), dtype, transforms=tile(value_size)),
        "q_full": plgpu.Barrier(num_barriers=2),
        "q_free": plgpu.Barrier(num_barriers=1, num_arrivals=2),
        "k_full": plgpu.Barrier(num_barriers=config.stages),
        "v_full": plgpu.Barrier(num_barriers=config.stages),
        "k_free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=2),
        "v_free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=2),
        "turn": plgpu.Barrier(num_arrivals=2),
        "turns": plgpu.Barrier(num_barriers=2),
    }
    if separate:
        scratch["o_smem"] = plgpu.SMEM((2, WARPGROUP_ROWS, value_size), dtype, transforms=tile(value_size))
    scratch_names = tuple(scratch)

    def body(*refs):
        arrays = dict(zip(names, refs, strict=False))
        out_ref, lse_ref = refs[len(names) : len(names) + 2]
        places = dict(zip(scratch_names, refs[len(names) + 2 :], strict=True))
        _kernel(arrays, out_ref, lse_ref, places, length, tiles, ctas, options, config, separate)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, length, heads, value_size), dtype),
            jax.ShapeDtypeStruct((batch, heads, tiles * TILE), jnp.float32),
        ),
        scratch_types=tuple(scratch.values()),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=False
        ),
        kernel_name="attention_forward",
        interpret=interpret,
    )
    return kernel(*inputs.values())


def _kernel(arrays, out_ref, lse_ref, smem, length, tiles, ctas, options: Options, config: ForwardConfig, separate):
    q_ref, k_ref, v_ref = arrays["q"], arrays["k"], arrays["v"]
    batch, _, heads, size = q_ref.shape
    keys, group = k_ref.shape[1], heads // k_ref.shape[2]
    value_size = v_ref.shape[3]
    block, stages = config.block_kv, config.stages
    rows = common.Rows(arrays.get("start"), arrays.get("end"), arrays.get("offset"), length, keys, options)
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    turns = common.rounds(cta, ctas, batch * tiles * heads)
    dtype = q_ref.dtype

    def tile(turn):
        return common.query_tile(common.snake(turn, cta, ctas), rows, arrays.get("order"), batch, heads, tiles, block)

    @pl.when(warpgroup == 2)
    def _load():
        plgpu.set_max_registers(24, action="decrease")

        def load_tile(turn, count):
            row, first, head, low, _, _, high = tile(turn)
            key_head = lax.div(head, jnp.int32(group))

            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(smem["q_free"].at[0])

            for part in range(2):
                place = pl.ds(first + part * WARPGROUP_ROWS, WARPGROUP_ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[row, place, head], smem["q_smem"].at[part], smem["q_full"].at[part])

            def load_block(step, count):
                slot = lax.rem(count, jnp.int32(stages))
                place = (row, pl.ds((high - 1 - step) * block, block), key_head)
                for ref, name in ((k_ref, "k"), (v_ref, "v")):

                    @pl.when(count >= stages)
                    def _(name=name):
                        plgpu.barrier_wait(smem[f"{name}_free"].at[slot])

                    plgpu.copy_gmem_to_smem(ref.at[place], smem[f"{name}_smem"].at[slot], smem[f"{name}_full"].at[slot])
                return count + 1

            return lax.fori_loop(0, high - low, load_block, count)

        lax.fori_loop(0, turns, load_tile, jnp.int32(0))

    def take_turns():
        if config.pingpong:
            plgpu.barrier_arrive(smem["turn"])
            plgpu.barrier_wait(smem["turn"])

    @pl.when(warpgroup < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        q_smem = smem["q_smem"].at[warpgroup]
        o_smem = smem["o_smem" if separate else "q_smem"].at[warpgroup]
        if config.overlap and config.pingpong:

            @pl.when(warpgroup == 1)
            def _():
                plgpu.barrier_arrive(smem["turns"].at[0])

        elif separate:
            pl.when(warpgroup == 1)(take_turns)

        def compute_tile(turn, count):
            row, first, head, low, inner, outer, high = tile(turn)
            first = first + warpgroup * WARPGROUP_ROWS
            start, end = rows.of_rows(row, first)
            plgpu.barrier_wait(smem["q_full"].at[warpgroup])
            if not separate and not config.overlap:
                pl.when(warpgroup == 1)(take_turns)

            def step(masked, index, carry):
                acc, top, total, count = carry
                block_index = high - 1 - index
                slot = lax.rem(count, jnp.int32(stages))
                plgpu.barrier_wait(smem["k_full"].at[slot])

                def logits(s_ref):
                    plgpu.wgmma(s_ref, q_smem, smem["k_smem"].at[slot].T)
                    take_turns()
                    return s_ref[...]

                s = pl.run_scoped(logits, plgpu.ACC((WARPGROUP_ROWS, block), jnp.float32))
                plgpu.barrier_arrive(smem["k_free"].at[slot])
                if separate:  # here and not behind the loop: the other warpgroup's next turn may need the next queries

                    @pl.when(block_index == low)
                    def _():
                        plgpu.barrier_arrive(smem["q_free"].at[0])

                s, c, _ = common.capped(s, options)
                if masked:
                    s = common.mask(s, start, end, block_index * block)
                new_top = jnp.maximum(top, jnp.max(s, axis=1) * c)
                alpha = jnp.exp2(top - new_top)
                p = jnp.exp2(s * c - common.broadcast_rows(new_top, s.shape))
                acc = acc * common.broadcast_rows(alpha, acc.shape)
                total = total * alpha + jnp.sum(p, axis=1)
                p16 = p.astype(dtype)
                acc, total, new_top, p16 = lax.optimization_barrier((acc, total, new_top, p16))
                if config.pingpong:
                    plgpu.barrier_arrive(smem["turn"])
                plgpu.barrier_wait(smem["v_full"].at[slot])
                if config.pingpong:
                    plgpu.barrier_wait(smem["turn"])

                def values(acc_ref):
                    plgpu.wgmma(acc_ref, p16, smem["v_smem"].at[slot])

                acc = pl.run_state(values)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(smem["v_free"].at[slot])
                return acc, new_top, total, count + 1

            def softmax(s, top, block_index, masked):
                """The weights of a block, their row sums, and what earlier ones are to be multiplied with."""
                s, c, _ = common.capped(s, options)
                if masked:
                    s = common.mask(s, start, end, block_index * block)
                new_top = jnp.maximum(top, jnp.max(s, axis=1) * c)
                p = jnp.exp2(s * c - common.broadcast_rows(new_top, s.shape))
                return p, jnp.sum(p, axis=1), jnp.exp2(top - new_top), new_top

            def release(block_index, slot):
                plgpu.barrier_arrive(smem["k_free"].at[slot])
                if separate:

                    @pl.when(block_index == low)
                    def _():
                        plgpu.barrier_arrive(smem["q_free"].at[0])

            def overlapped(masked, index, carry):
                """The product with the keys of a block and with the values of the block before it, at the same time."""
                acc, top, total, p16, count = carry
                block_index = high - 1 - index
                slot, before = lax.rem(count, jnp.int32(stages)), lax.rem(count + (stages - 1), jnp.int32(stages))

                def products(s_ref, acc_ref):
                    acc_ref[...] = acc
                    plgpu.barrier_wait(smem["k_full"].at[slot])
                    if config.pingpong:
                        plgpu.barrier_wait(smem["turns"].at[warpgroup])
                    plgpu.wgmma(s_ref, q_smem, smem["k_smem"].at[slot].T)
                    plgpu.barrier_wait(smem["v_full"].at[before])
                    plgpu.wgmma(acc_ref, p16, smem["v_smem"].at[before])
                    if config.pingpong:
                        plgpu.barrier_arrive(smem["turns"].at[1 - warpgroup])
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    release(block_index, slot)
                    p, summed, alpha, new_top = softmax(s, top, block_index, masked)
                    new_acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    plgpu.barrier_arrive(smem["v_free"].at[before])
                    new_acc = new_acc * common.broadcast_rows(alpha, acc.shape)
                    return new_acc, new_top, total * alpha + summed, p.astype(dtype)

                shapes = ((WARPGROUP_ROWS, block), (WARPGROUP_ROWS, value_size))
                carry = pl.run_scoped(products, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
                return *carry, count + 1

            def overlapped_tile():
                slot = lax.rem(count, jnp.int32(stages))

                def first_logits(s_ref):
                    plgpu.barrier_wait(smem["k_full"].at[slot])
                    plgpu.wgmma(s_ref, q_smem, smem["k_smem"].at[slot].T)
                    return s_ref[...]

                s = pl.run_scoped(first_logits, plgpu.ACC((WARPGROUP_ROWS, block), jnp.float32))
                release(high - 1, slot)
                p, total, _, top = softmax(s, common.full_rows(LOWEST), high - 1, True)
                carry = common.zeros((WARPGROUP_ROWS, value_size)), top, total, p.astype(dtype), count + 1
                plain, masked = functools.partial(overlapped, False), functools.partial(overlapped, True)
                carry = lax.fori_loop(1, high - outer, masked, carry)
                carry = lax.fori_loop(jnp.maximum(high - outer, 1), high - inner, plain, carry)
                if rows.start is not None or options.sliding_window is not None:
                    carry = lax.fori_loop(jnp.maximum(high - inner, 1), high - low, masked, carry)
                acc, top, total, p16, after = carry
                slot = lax.rem(after + (stages - 1), jnp.int32(stages))

                def last_values(acc_ref):
                    plgpu.barrier_wait(smem["v_full"].at[slot])
                    plgpu.wgmma(acc_ref, p16, smem["v_smem"].at[slot])

                acc = pl.run_state(last_values)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(smem["v_free"].at[slot])
                return acc, top, total, after

            def alternating_tile():
                carry = common.zeros((WARPGROUP_ROWS, value_size)), common.full_rows(LOWEST), common.full_rows(0.0), count
                plain, masked = functools.partial(step, False), functools.partial(step, True)
                carry = lax.fori_loop(0, high - outer, masked, carry)
                carry = lax.fori_loop(high - outer, high - inner, plain, carry)
                if rows.start is not None or options.sliding_window is not None:
                    carry = lax.fori_loop(high - inner, high - low, masked, carry)
                return carry

            acc, top, total, count = overlapped_tile() if config.overlap else alternating_tile()
            if not separate and not config.overlap:
                pl.when(warpgroup == 0)(take_turns)
            empty = total == 0.0
            if "sinks" in arrays:
                sink = arrays["sinks"][head] * LOG2E
                new_top = jnp.maximum(top, sink)
                acc = acc * common.broadcast_rows(jnp.exp2(top - new_top), acc.shape)
                total = total * jnp.exp2(top - new_top) + jnp.exp2(sink - new_top)
                lse = (new_top + jnp.log2(total)) / LOG2E
            else:
                lse = jnp.where(empty, jnp.inf, (top + jnp.log2(total)) / LOG2E)
            factor = jnp.where(empty, 0.0, 1.0 / total)
            acc = acc * common.broadcast_rows(factor, acc.shape)
            plgpu.wait_smem_to_gmem(0)
            o_smem[...] = acc.astype(dtype)
            lse_ref[row, head, pl.ds(first, WARPGROUP_ROWS)] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, out_ref.at[row, pl.ds(first, WARPGROUP_ROWS), head])
            if not separate:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(smem["q_free"].at[0])
            return count

        lax.fori_loop(0, turns, compute_tile, jnp.int32(0))
        if separate and not config.overlap:
            pl.when(warpgroup == 0)(take_turns)
        plgpu.wait_smem_to_gmem(0)

