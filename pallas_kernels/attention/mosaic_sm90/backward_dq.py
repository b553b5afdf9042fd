"""The backward pass in the queries: dq = scale · dS k, with P and dS computed again from the log-sum-exp.

Persistent, like the forward kernel: tiles of 128 queries of one head, one warpgroup that loads and two that compute 64
queries each. With δ = rowsum(dout ∘ out): P = exp(logits − lse), dS = P ∘ (dout vᵀ − δ) (FlashAttention-2, arXiv
2307.08691, algorithm 2).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.attention.mosaic_sm90 import common
from pallas_kernels.attention.mosaic_sm90.common import ROWS, WARPGROUP_ROWS
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.ranges import TILE, SegmentRanges


@dataclasses.dataclass(frozen=True)
class DqConfig:
    block_kv: int = 128
    stages: int = 2
    lag: bool = False
    ctas: int = 132


@functools.partial(jax.jit, static_argnames=("options", "config", "interpret"))
def backward_dq(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    ranges: SegmentRanges | None,
    query_offset: Array | None,
    seed: Array | None,
    *,
    options: Options,
    config: DqConfig,
    interpret: Any = None,
) -> Array:
    """lse (times log2 e) and delta are [B, H, S padded to tiles]."""
    batch, length, heads, size = q.shape
    value_size = v.shape[3]
    tiles = pl.cdiv(length, TILE)
    total = batch * tiles * heads
    ctas = min(config.ctas, total)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta}
    if ranges is not None:
        inputs |= {"start": common.padded_rows(ranges.k_start), "end": common.padded_rows(ranges.k_end)}
        inputs |= {"order": ranges.q_order}
    if query_offset is not None:
        inputs |= {"offset": query_offset}
    names = tuple(inputs)
    dtype = q.dtype
    tile = lambda columns: common.transforms(columns)
    scratch = {
        "q_smem": plgpu.SMEM((2, WARPGROUP_ROWS, size), dtype, transforms=tile(size)),
        "do_smem": plgpu.SMEM((2, WARPGROUP_ROWS, value_size), dtype, transforms=tile(value_size)),
        "k_smem": plgpu.SMEM((config.stages, config.block_kv, size), dtype, transforms=tile(size)),
        "v_smem": plgpu.SMEM((config.stages, config.block_kv, value_size), dtype, transforms=tile(value_size)),
        "q_full": plgpu.Barrier(num_barriers=2, num_arrivals=2),
        "q_free": plgpu.Barrier(num_barriers=1, num_arrivals=2),
        "k_full": plgpu.Barrier(num_barriers=config.stages),
        "v_full": plgpu.Barrier(num_barriers=config.stages),
        "k_free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=2),
        "v_free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=2),
    }
    scratch_names = tuple(scratch)

    def body(*refs):
        arrays = dict(zip(names, refs, strict=False))
        places = dict(zip(scratch_names, refs[len(names) + 1 :], strict=True))
        _kernel(arrays, refs[len(names)], places, length, tiles, ctas, options, config)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, length, heads, size), dtype),
        scratch_types=tuple(scratch.values()),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=False
        ),
        kernel_name="attention_backward_dq",
        interpret=interpret,
    )
    return kernel(*inputs.values())


def _kernel(arrays, dq_ref, smem, length, tiles, ctas, options: Options, config: DqConfig):
    q_ref, k_ref, v_ref, do_ref = (arrays[name] for name in ("q", "k", "v", "dout"))
    batch, _, heads, size = q_ref.shape
    keys, group = k_ref.shape[1], heads // k_ref.shape[2]
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
                place = (row, pl.ds(first + part * WARPGROUP_ROWS, WARPGROUP_ROWS), head)
                plgpu.copy_gmem_to_smem(q_ref.at[place], smem["q_smem"].at[part], smem["q_full"].at[part])
                plgpu.copy_gmem_to_smem(do_ref.at[place], smem["do_smem"].at[part], smem["q_full"].at[part])

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

    @pl.when(warpgroup < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        q_smem, do_smem = smem["q_smem"].at[warpgroup], smem["do_smem"].at[warpgroup]

        def compute_tile(turn, count):
            row, first, head, low, inner, outer, high = tile(turn)
            first = first + warpgroup * WARPGROUP_ROWS
            start, end = rows.of_rows(row, first)
            place = pl.ds(first, WARPGROUP_ROWS)
            lse = compat.mosaic_load(arrays["lse"].at[row, head, place], ROWS)
            delta = compat.mosaic_load(arrays["delta"].at[row, head, place], ROWS)
            plgpu.barrier_wait(smem["q_full"].at[warpgroup])

            def gradient(dq_ref):
                def step(masked, index, count):
                    slot = lax.rem(count, jnp.int32(stages))
                    k_smem, v_smem = smem["k_smem"].at[slot], smem["v_smem"].at[slot]

                    def products(s_ref, dp_ref):
                        plgpu.barrier_wait(smem["k_full"].at[slot])
                        plgpu.wgmma(s_ref, q_smem, k_smem.T)
                        plgpu.barrier_wait(smem["v_full"].at[slot])
                        plgpu.wgmma(dp_ref, do_smem, v_smem.T)
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                        if config.lag:  # the previous block's dq is done too
                            @pl.when(index > 0)
                            def _():
                                plgpu.barrier_arrive(smem["k_free"].at[lax.rem(count + (stages - 1), jnp.int32(stages))])
                        s, c, slope = common.capped(s, options)
                        if masked:
                            s = common.mask(s, start, end, (high - 1 - index) * block)
                        p = jnp.exp2(s * c - common.broadcast_rows(lse, s.shape))
                        dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                        plgpu.barrier_arrive(smem["v_free"].at[slot])
                        ds = p * (dp - common.broadcast_rows(delta, s.shape))
                        return ds if slope is None else ds * slope

                    shape = (WARPGROUP_ROWS, block)
                    ds = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                    plgpu.wgmma(dq_ref, ds.astype(dtype), k_smem)
                    if not config.lag:
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(smem["k_free"].at[slot])
                    return count + 1

                plain, masked = functools.partial(step, False), functools.partial(step, True)
                counted = lax.fori_loop(0, high - outer, masked, count)
                counted = lax.fori_loop(high - outer, high - inner, plain, counted)
                if rows.start is not None or options.sliding_window is not None:
                    counted = lax.fori_loop(high - inner, high - low, masked, counted)
                result = dq_ref[...]
                if config.lag:
                    plgpu.barrier_arrive(smem["k_free"].at[lax.rem(counted + (stages - 1), jnp.int32(stages))])
                return result

            dq = pl.run_scoped(gradient, plgpu.ACC((WARPGROUP_ROWS, size), jnp.float32))
            q_smem[...] = (dq * options.scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem, dq_ref.at[row, place, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(smem["q_free"].at[0])
            return count + (high - low)

        lax.fori_loop(0, turns, compute_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
