"""y = x Wᵀ for some hundred rows, yᵀ = W xᵀ: decoded weights never leave the registers of who multiplies with them.

A persistent kernel of three warpgroups: one loads (TMA), two decode and multiply (wgmma), each 64 rows of W with all of
a tile's rows of x. The weights are the register operand: while the tensor cores work on 64 columns, the threads decode
the next 64. Two thread blocks of a cluster share the rows of x, each loads half of them for both.

A thread's elements of an operand of 64 columns are the pair 2q, 2q + 1 (q: its lane of four) in each eight of two rows.
Its pairs of eight and the next eight are what two 32-bit words of codes hold beside those of the neighbouring lane; a
byte permutation joins them to one word. Four lanes share a block and each makes the table of its products anew.

Prediction for a step of 128 × 256 × 64 on a Hopper multiprocessor, in cycles: the tensor cores take 1,024; shared
memory moves 64 KB to them and 36 KB into it: 800; decoding takes 5.2 instructions a code, 330 issue slots of each of
the four schedulers. From the L2 cache come 16 bytes of x a cycle and multiprocessor, 32 without clusters.
"""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, UInt8

from pallas_kernels import compat
from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.config import RegistersConfig
from pallas_kernels.nf4.mosaic_sm90.fused import fence, stay
from pallas_kernels.nf4.mosaic_sm90.lookup import joined, look_up_word
from pallas_kernels.nf4.mosaic_sm90.work import Segment, Work

GRAIN = 256
"""`in` is a multiple of it: a row of scales is then a multiple of 16 bytes, as TMA takes them."""
_CONSUMERS = 2
_ROWS = 64
"""Rows of W of a consumer."""
_TERMS = 2 * BLOCK
"""Columns of W in a step."""
_SCALES = 4
"""Scales of a row that are loaded with a step: 16 bytes, those of two steps."""
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24
_SWIZZLED = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))
_CODES = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(64))


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("config", "cores", "interpret"))
def in_registers(
    x: Float[Array, "rows in"],
    codes: UInt8[Array, "out half_in"],
    absmax: Float[Array, "out blocks"],
    *,
    config: RegistersConfig,
    cores: int,
    interpret: Any = None,
) -> Float[Array, "rows out"]:
    """The product of x with a packed matrix transposed; summed in float32.

    Args:
        x: bfloat16 or float16; `in` a multiple of GRAIN.
        codes: uint8, split order; `out` a multiple of 64, at least config.tile_columns.
        absmax: float32.
        config: block sizes; the interpreter takes no clusters.
        cores: multiprocessors; each runs one thread block.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    (given_rows, summed), columns, cluster = x.shape, codes.shape[0], config.cluster
    x = jnp.pad(x, ((0, -given_rows % 8), (0, 0)))  # TMA takes whole rows of swizzled tiles
    rows = x.shape[0]
    work = Work.of(rows, columns, summed, config, _TERMS, cores // cluster)
    free = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",)) if cluster > 1 else plgpu.Barrier
    scratch = {
        "x_smem": plgpu.SMEM((config.x_stages, config.rows, BLOCK), x.dtype, transforms=_SWIZZLED),
        "codes_smem": plgpu.SMEM((config.w_stages, _CONSUMERS, _ROWS, _TERMS // 2), jnp.uint8, transforms=_CODES),
        "absmax_smem": plgpu.SMEM((config.w_stages, _CONSUMERS, _ROWS, _SCALES), jnp.float32),
        "out_smem": plgpu.SMEM((_CONSUMERS, 2, 64, _ROWS), x.dtype, transforms=_SWIZZLED),
        "x_full": plgpu.Barrier(num_barriers=config.x_stages),
        "x_free": free(num_barriers=config.x_stages, num_arrivals=_CONSUMERS),
        "w_full": plgpu.Barrier(num_barriers=config.w_stages, num_arrivals=2 * _CONSUMERS),
        "w_free": plgpu.Barrier(num_barriers=config.w_stages, num_arrivals=_CONSUMERS),
    }
    body = functools.partial(_kernel, names=tuple(scratch), work=work, config=config, interpreted=interpret is not None)
    clusters = {"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}
    parts = (work.ctas * cluster * _CONSUMERS if work.cut else 1, _ROWS, config.rows)
    out, _ = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((rows, columns), x.dtype), jax.ShapeDtypeStruct(parts, jnp.float32)),
        scratch_types=tuple(scratch.values()),
        grid=(work.ctas,),
        grid_names=("cluster",),
        **clusters,
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="nf4_in_registers",
        interpret=interpret,
    )(x, codes, absmax)
    return out[:given_rows]


def _kernel(x, codes, absmax, out, parts, *scratch, names, work: Work, config: RegistersConfig, interpreted: bool):
    refs = types.SimpleNamespace(
        x=x, codes=codes, absmax=absmax, out=out, parts=parts, **dict(zip(names, scratch, strict=True))
    )
    cluster, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    rank = lax.axis_index("rank") if config.cluster > 1 else 0
    total = work.begin(cluster + 1) - work.begin(cluster)
    # The interpreter runs thread blocks in order: nobody waits there.
    shared = work.cut and not interpreted
    done = pl.get_global(plgpu.SemaphoreType.REGULAR((work.ctas * config.cluster,))) if shared else None

    @pl.when(warpgroup < _CONSUMERS)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        segments = work.segments(cluster)

        def multiply(turn, carry):
            count, weights = carry
            segment = work.segment(cluster, turn)
            following = work.segment(cluster, lax.min(turn + 1, segments - 1)).begin
            sums, count, weights = _multiply(refs, segment, following, warpgroup, count, weights, config, interpreted)
            _write(refs, work, done, segment, sums, cluster, rank, warpgroup, config, interpreted)
            return count, weights

        weights = _decode(refs, jnp.int32(0), work.segment(cluster, 0).begin, warpgroup, 0, config, interpreted)
        lax.fori_loop(0, segments, multiply, (jnp.int32(0), weights))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _CONSUMERS)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        _load(refs, work, cluster, rank, total, config)


def _load(refs, work: Work, cluster, rank, total, config: RegistersConfig):
    """What the loading warpgroup does: one step more of W than is multiplied with, since decoding is ahead by that."""

    def load(count, _):
        row, column, term = work.place(cluster, lax.min(count, total - 1))
        slot = lax.rem(count, jnp.int32(config.w_stages))
        pl.when(count >= config.w_stages)(lambda: plgpu.barrier_wait(refs.w_free.at[slot]))
        for consumer in range(_CONSUMERS):
            rows = pl.ds(column + rank * (_CONSUMERS * _ROWS) + consumer * _ROWS, _ROWS)
            codes = refs.codes.at[rows, pl.ds(lax.div(term, jnp.int32(2)), _TERMS // 2)]
            plgpu.copy_gmem_to_smem(codes, refs.codes_smem.at[slot, consumer], refs.w_full.at[slot])
            scales = lax.div(term, jnp.int32(_SCALES * BLOCK)) * _SCALES
            absmax = refs.absmax.at[rows, pl.ds(scales, _SCALES)]
            plgpu.copy_gmem_to_smem(absmax, refs.absmax_smem.at[slot, consumer], refs.w_full.at[slot])

        @pl.when(count < total)
        def _():
            for half in range(2):
                x_count = 2 * count + half
                x_slot = lax.rem(x_count, jnp.int32(config.x_stages))
                pl.when(x_count >= config.x_stages)(lambda x_slot=x_slot: plgpu.barrier_wait(refs.x_free.at[x_slot]))
                source = refs.x.at[pl.ds(row, config.rows), pl.ds(term + half * BLOCK, BLOCK)]
                axes = "rank" if config.cluster > 1 else None
                plgpu.copy_gmem_to_smem(source, refs.x_smem.at[x_slot], refs.x_full.at[x_slot], collective_axes=axes)

        return None

    lax.fori_loop(0, total + 1, load, None)
    if config.cluster > 1:
        stay(refs.x_free, 2 * total, config.x_stages)


def _decode(refs, count, step, consumer, half: int, config: RegistersConfig, interpreted: bool):
    """64 rows and 64 columns of W as operand: half of what was loaded as `count`th, a tile's step `step`."""
    slot = lax.rem(count, jnp.int32(config.w_stages))
    if half == 0:
        plgpu.barrier_wait(refs.w_full.at[slot])
    codes = refs.codes_smem.at[slot, consumer]
    absmax = refs.absmax_smem.at[slot, consumer, :, lax.rem(step, jnp.int32(2)) * 2 + half]
    dtype = refs.x_smem.dtype
    if interpreted:
        part, scales = codes[:, half * BLOCK_BYTES : (half + 1) * BLOCK_BYTES], absmax[...][:, None]
        weights = jnp.concatenate([ptx.lookup_in_jax(part, scales, dtype, name) for name in ptx.HALVES], axis=1)
    else:
        scales = compat.mosaic_load(absmax, plgpu.Layout.WGMMA.reduce(1))
        weights = _look_up(codes, scales, dtype, half)
    if half == 1:
        plgpu.barrier_arrive(refs.w_free.at[slot])
    return weights


def _look_up(codes, absmax, dtype, half: int):
    """The operand from the codes of a step of 128 columns, in shared memory, and the scales of the half."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_CODES), plgpu.Layout.WGMMA.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct((_ROWS, BLOCK), dtype, layout=plgpu.Layout.WGMMA),
    )
    def look_up(_, codes, absmax):
        layout = mgpu.WGMMA_LAYOUT
        scales = [vector.extract(register, [], [0]) for register in absmax.registers.reshape(2)]
        pointer, select = mgpu.utils.memref_ptr(codes), _pair_of_lane()
        decoded = np.empty((BLOCK // 8, 2), object)  # eight columns, and rows that are 8 apart
        for row, scale in enumerate(scales):
            for piece in range(2):  # 16 bytes of the block
                word = _load_word(pointer, select, row, 2 * half + piece)
                for nibble, registers in enumerate(look_up_word(word, scale, dtype)):
                    for index, register in enumerate(registers):
                        decoded[4 * nibble + 2 * piece + index, row] = joined([register], dtype)
        registers = decoded.reshape(layout.registers_shape((_ROWS, BLOCK)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return look_up(codes, absmax)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _constant(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _lane() -> tuple[ir.Value, ir.Value, ir.Value]:
    """The thread's warp in its warpgroup, its row of eight and its lane of four."""
    thread = mgpu.utils.thread_idx()
    warp = arith.andi(arith.shrui(thread, _constant(5)), _constant(3))
    return warp, arith.andi(arith.shrui(thread, _constant(2)), _constant(7)), arith.andi(thread, _constant(3))


def _pair_of_lane() -> ir.Value:
    """Which bytes of two words are this lane's: the lower or the upper two of each."""
    _, _, quarter = _lane()
    odd = arith.andi(quarter, _constant(1))
    return arith.addi(_constant(0x5410), arith.muli(odd, _constant(0x2222)))


def _load_word(pointer: ir.Value, select: ir.Value, row: int, piece: int) -> ir.Value:
    """The lane's codes in 16 bytes: two of the first eight, two of the other eight.

    Args:
        pointer: codes [64, 64] in shared memory, 64-byte swizzle: 16-byte pieces of rows 2i and 2i + 1 change places
            (exclusive or) by i.
        select: by `_pair_of_lane`.
        row: 0, or 1 for the row 8 below.
        piece: of the row, 0 to 3.
    """
    i32 = ir.IntegerType.get_signless(32)
    warp, eighth, quarter = _lane()
    place = arith.addi(arith.muli(warp, _constant(16 * 64)), arith.muli(eighth, _constant(64)))
    place = arith.addi(place, arith.muli(arith.shrui(quarter, _constant(1)), _constant(4)))
    swizzled = arith.xori(arith.shrui(eighth, _constant(1)), _constant(piece))
    place = arith.addi(place, arith.muli(swizzled, _constant(16)))
    words = []
    for offset in (0, 8):
        where = arith.addi(place, _constant(row * 8 * 64 + offset))
        address = mgpu.utils.getelementptr(pointer, [where], ir.IntegerType.get_signless(8))
        words.append(llvm.load(i32, address, alignment=4))
    joined_words = llvm.inline_asm(i32, [*words, select], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", asm_dialect=0)
    assert isinstance(joined_words, ir.Value)
    return joined_words


def _multiply(refs, segment: Segment, following, consumer, count, weights, config: RegistersConfig, interpreted: bool):
    """A tile's sums [64, rows], how many steps were taken in all, and the weights of the first half of the next."""

    def release(x_count):
        plgpu.barrier_arrive(refs.x_free.at[lax.rem(x_count, jnp.int32(config.x_stages))])

    def products(sums_ref):
        def multiply(x_count, weights):
            slot = lax.rem(x_count, jnp.int32(config.x_stages))
            plgpu.barrier_wait(refs.x_full.at[slot])
            plgpu.wgmma(sums_ref, weights, refs.x_smem.at[slot].T)
            plgpu.wgmma_wait(1)

        def step(index, carry):
            count, weights = carry
            multiply(2 * count, weights)
            pl.when(index > segment.begin)(lambda: release(2 * count - 1))
            weights = _decode(refs, count, index, consumer, 1, config, interpreted)
            multiply(2 * count + 1, weights)
            release(2 * count)
            following_step = lax.select(index + 1 < segment.end, index + 1, following)
            return count + 1, _decode(refs, count + 1, following_step, consumer, 0, config, interpreted)

        end, following_weights = lax.fori_loop(segment.begin, segment.end, step, (count, weights))
        sums = sums_ref[...]
        release(2 * end - 1)
        return sums, end, following_weights

    accumulator = plgpu.ACC((_ROWS, config.rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(products, accumulator)


def _write(
    refs, work: Work, done, segment: Segment, sums, cluster, rank, consumer, config: RegistersConfig, interpreted: bool
):
    """Hand the sums of a tile's first part on; or add what was handed on, and write the tile."""

    def part(cluster, row):
        place = (cluster * config.cluster + rank) * _CONSUMERS + consumer
        return refs.parts.at[place, :, pl.ds(row, 64)]

    def hand_on():
        for row in range(0, config.rows, 64):
            part(cluster, row)[...] = sums[:, row : row + 64]
        if done is not None:
            fence()
            pl.semaphore_signal(done.at[cluster * config.cluster + rank])

    def finish():
        first = work.owner(segment.tile * work.steps)
        if done is not None:

            def wait(cluster, _):
                # Neither warpgroup takes the other's signal away.
                pl.semaphore_wait(done.at[cluster * config.cluster + rank], _CONSUMERS, decrement=False)

            lax.fori_loop(first, cluster, wait, None)

        def add(row):
            def add_one(cluster, total):
                found = part(cluster, row)
                return total + (found[...] if interpreted else compat.mosaic_load(found, plgpu.Layout.WGMMA))

            total = sums[:, row : row + 64]
            return lax.fori_loop(first, cluster, add_one, total) if work.cut else total

        column = segment.column + rank * (_CONSUMERS * _ROWS) + consumer * _ROWS
        for number, row in enumerate(range(0, config.rows, 64)):
            out_smem = refs.out_smem.at[consumer, number % 2]
            values = add(row).astype(out_smem.dtype)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            if interpreted:
                out_smem[...] = values.T
            else:
                out_smem.T[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            # What a tile that was moved back shares with its neighbour, the neighbour writes: it may have been cut
            # elsewhere, so that its sums differ by roundings.
            target = refs.out.at[pl.ds(segment.row + row, 64), pl.ds(column, _ROWS)]
            store = functools.partial(plgpu.copy_smem_to_gmem, out_smem, target)
            pl.when(column >= work.own_column(segment.tile))(store)

    if work.cut:
        pl.when(segment.end < work.steps)(hand_on)
        pl.when(segment.end == work.steps)(finish)
    else:
        finish()
