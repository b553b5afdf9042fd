"""The backward pass in the keys and values: dv = Pᵀ dout, dk = scale · dSᵀ q.

Persistent: tiles of 128 keys of one key head, heaviest first; one warpgroup loads, two hold the accumulators of 64 keys
each and run over the queries of every query head that shares the key head, so that no gradient of a single query
head is ever in memory and the order of all sums is fixed. Everything is transposed: rows are keys, columns queries.
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
from pallas_kernels.attention.mosaic_sm90.common import COLUMNS, WARPGROUP_ROWS
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.ranges import TILE, SegmentRanges


@dataclasses.dataclass(frozen=True)
class DkvConfig:
    block_q: int = 64
    stages: int = 3
    ctas: int = 132


@functools.partial(jax.jit, static_argnames=("options", "config", "interpret"))
def backward_dkv(
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
    config: DkvConfig,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """lse (times log2 e) and delta are [B, H, S padded to tiles]."""
    batch, keys, key_heads, size = k.shape
    value_size = v.shape[3]
    tiles = pl.cdiv(keys, TILE)
    total = batch * tiles * key_heads
    ctas = min(config.ctas, total)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta}
    if ranges is not None:
        inputs |= {"start": common.padded_rows(ranges.q_start), "end": common.padded_rows(ranges.q_end)}
        inputs |= {"order": ranges.k_order}
    if query_offset is not None:
        inputs |= {"offset": query_offset}
    names = tuple(inputs)
    dtype = q.dtype
    tile = lambda columns: common.transforms(columns)
    stages, block = config.stages, config.block_q
    scratch = {
        "k_smem": plgpu.SMEM((2, WARPGROUP_ROWS, size), dtype, transforms=tile(size)),
        "v_smem": plgpu.SMEM((2, WARPGROUP_ROWS, value_size), dtype, transforms=tile(value_size)),
        "q_smem": plgpu.SMEM((stages, block, size), dtype, transforms=tile(size)),
        "do_smem": plgpu.SMEM((stages, block, value_size), dtype, transforms=tile(value_size)),
        "lse_smem": plgpu.SMEM((stages, block), jnp.float32),
        "delta_smem": plgpu.SMEM((stages, block), jnp.float32),
        "kv_full": plgpu.Barrier(num_barriers=2, num_arrivals=2),
        "kv_free": plgpu.Barrier(num_barriers=1, num_arrivals=2),
        "q_full": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        "do_full": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        "free": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
    }
    scratch_names = tuple(scratch)

    def body(*refs):
        arrays = dict(zip(names, refs, strict=False))
        dk_ref, dv_ref = refs[len(names) : len(names) + 2]
        places = dict(zip(scratch_names, refs[len(names) + 2 :], strict=True))
        _kernel(arrays, dk_ref, dv_ref, places, tiles, ctas, options, config)

    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        scratch_types=tuple(scratch.values()),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=False
        ),
        kernel_name="attention_backward_dkv",
        interpret=interpret,
    )
    return kernel(*inputs.values())


def _kernel(arrays, dk_ref, dv_ref, smem, tiles, ctas, options: Options, config: DkvConfig):
    q_ref, k_ref, v_ref, do_ref = (arrays[name] for name in ("q", "k", "v", "dout"))
    batch, length, heads, size = q_ref.shape
    keys, key_heads = k_ref.shape[1:3]
    group, value_size = heads // key_heads, v_ref.shape[3]
    block, stages = config.block_q, config.stages
    rows = common.Rows(arrays.get("start"), arrays.get("end"), arrays.get("offset"), keys, length, options, True)
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    turns = common.rounds(cta, ctas, batch * tiles * key_heads)
    dtype = q_ref.dtype

    def tile(turn):
        place = common.snake(turn, cta, ctas)
        return common.key_tile(place, rows, arrays.get("order"), batch, key_heads, tiles, block)

    @pl.when(warpgroup == 2)
    def _load():
        plgpu.set_max_registers(24, action="decrease")

        def load_tile(turn, count):
            row, first, key_head, low, _, _, high = tile(turn)

            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(smem["kv_free"].at[0])

            for part in range(2):
                place = (row, pl.ds(first + part * WARPGROUP_ROWS, WARPGROUP_ROWS), key_head)
                plgpu.copy_gmem_to_smem(k_ref.at[place], smem["k_smem"].at[part], smem["kv_full"].at[part])
                plgpu.copy_gmem_to_smem(v_ref.at[place], smem["v_smem"].at[part], smem["kv_full"].at[part])

            def load_block(step, count):
                slot = lax.rem(count, jnp.int32(stages))
                head = key_head * group + lax.div(step, high - low)
                queries = pl.ds((low + lax.rem(step, high - low)) * block, block)

                @pl.when(count >= stages)
                def _():
                    plgpu.barrier_wait(smem["free"].at[slot])

                full = smem["q_full"].at[slot]
                plgpu.copy_gmem_to_smem(q_ref.at[row, queries, head], smem["q_smem"].at[slot], full)
                plgpu.copy_gmem_to_smem(arrays["lse"].at[row, head, queries], smem["lse_smem"].at[slot], full)
                full = smem["do_full"].at[slot]
                plgpu.copy_gmem_to_smem(do_ref.at[row, queries, head], smem["do_smem"].at[slot], full)
                plgpu.copy_gmem_to_smem(arrays["delta"].at[row, head, queries], smem["delta_smem"].at[slot], full)
                return count + 1

            return lax.fori_loop(0, (high - low) * group, load_block, count)

        lax.fori_loop(0, turns, load_tile, jnp.int32(0))

    @pl.when(warpgroup < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        k_smem, v_smem = smem["k_smem"].at[warpgroup], smem["v_smem"].at[warpgroup]

        def compute_tile(turn, count):
            row, first, key_head, low, inner, outer, high = tile(turn)
            first = first + warpgroup * WARPGROUP_ROWS
            start, end = rows.of_rows(row, first)
            plgpu.barrier_wait(smem["kv_full"].at[warpgroup])

            def gradients(dk_acc, dv_acc):
                def step(masked, index, count):
                    slot = lax.rem(count, jnp.int32(stages))
                    q_smem, do_smem = smem["q_smem"].at[slot], smem["do_smem"].at[slot]

                    def products(s_ref, dp_ref):
                        plgpu.barrier_wait(smem["q_full"].at[slot])
                        plgpu.wgmma(s_ref, k_smem, q_smem.T)
                        plgpu.barrier_wait(smem["do_full"].at[slot])
                        plgpu.wgmma(dp_ref, v_smem, do_smem.T)
                        lse = compat.mosaic_load(smem["lse_smem"].at[slot], COLUMNS)
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                        s, c, slope = common.capped(s, options)
                        if masked:
                            s = common.mask(s, start, end, index * block)
                        p = jnp.exp2(s * c - common.broadcast_columns(lse, s.shape))
                        plgpu.wgmma(dv_acc, p.astype(dtype), do_smem)
                        delta = compat.mosaic_load(smem["delta_smem"].at[slot], COLUMNS)
                        dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)
                        ds = p * (dp - common.broadcast_columns(delta, s.shape))
                        return ds if slope is None else ds * slope

                    shape = (WARPGROUP_ROWS, block)
                    ds = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                    plgpu.wgmma(dk_acc, ds.astype(dtype), q_smem)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(smem["free"].at[slot])
                    return count + 1

                def head(_, count):
                    plain, masked = functools.partial(step, False), functools.partial(step, True)
                    count = lax.fori_loop(low, inner, masked, count)
                    count = lax.fori_loop(inner, outer, plain, count)
                    return lax.fori_loop(outer, high, masked, count)

                lax.fori_loop(0, group, head, count)
                return dk_acc[...], dv_acc[...]

            dk, dv = pl.run_scoped(
                gradients,
                plgpu.ACC((WARPGROUP_ROWS, size), jnp.float32),
                plgpu.ACC((WARPGROUP_ROWS, value_size), jnp.float32),
            )
            k_smem[...] = (dk * options.scale).astype(dtype)
            v_smem[...] = dv.astype(dtype)
            plgpu.commit_smem()
            place = (row, pl.ds(first, WARPGROUP_ROWS), key_head)
            plgpu.copy_smem_to_gmem(k_smem, dk_ref.at[place])
            plgpu.copy_smem_to_gmem(v_smem, dv_ref.at[place])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(smem["kv_free"].at[0])
            return count + (high - low) * group

        lax.fori_loop(0, turns, compute_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
