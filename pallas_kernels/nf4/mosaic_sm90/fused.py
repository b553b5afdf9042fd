"""y = x Wᵀ and dx = dy W for some hundred rows: W is decoded in the kernel, once for as many rows as a tile holds.

A persistent kernel of five warpgroups: one loads x (TMA), two decode W, two multiply (wgmma). A tile of the result is,
say, 256 × 128; a step of its sum takes 64 terms. The decoding warpgroups read codes and scales straight from global
memory, some steps ahead; a thread decodes half a block, 16 bytes, with one table, and writes it where the tensor cores
read it: shared memory, 128-byte swizzle. The two products differ in nothing but where a step's codes lie and in which
of the decoded tile's dimensions is summed over.

Prediction for a step of 256 × 128 × 64 on a Hopper multiprocessor, in cycles: the tensor cores take 1,024; shared
memory moves 96 KB to them, 32 KB of x and 16 KB of decoded W into it: 1,150 at 128 bytes a cycle; decoding takes 3.75
integer instructions a code and 240 issue slots of each of the four schedulers, 480 at half rate. So up to 256 rows a
tile the decoding hides behind the product, at 128 rows it nearly does.
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
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float, UInt8

from pallas_kernels import compat
from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.config import FusedConfig
from pallas_kernels.nf4.mosaic_sm90.lookup import joined, look_up_word, words_of
from pallas_kernels.nf4.mosaic_sm90.work import Segment, Work

DECODERS = 2
_REGISTERS = 65536
_PRODUCER_REGISTERS = 32
_TRANSFORMS = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))


def _unit_layout(columns: int, part: tuple[int, int]):
    """Of 64 blocks below each other, codes or decoded: a lane holds half a block.

    Eight neighbouring lanes hold every other of eight rows, so that what they store at once, 16 bytes each, falls into
    different banks.
    """
    tiling = plgpu.Tiling(((64, columns), (16, columns), part, (2, 16), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-9,), lane_dims=(-7, -3, -5, -2), vector_dim=-1)


_CODES = _unit_layout(BLOCK_BYTES, (8, BLOCK_BYTES))
_DECODED = _unit_layout(BLOCK, (8, BLOCK_BYTES))


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("gradient", "config", "cores", "through", "interpret"))
def fused(
    x: Float[Array, "rows summed"],
    codes: UInt8[Array, "out half_in"],
    absmax: Float[Array, "out blocks"],
    *,
    gradient: bool,
    config: FusedConfig,
    cores: int,
    through: str | None = None,
    interpret: Any = None,
) -> Float[Array, "rows columns"]:
    """The product of x with a packed matrix transposed, or with the matrix itself; summed in float32.

    Args:
        x: bfloat16 or float16, [rows, in]; [rows, out] for the gradient.
        codes: uint8, split order; `out` and `in` multiples of 64, the one that is not summed over at least
            config.columns.
        absmax: float32.
        gradient: multiply with the matrix as it is, as the gradient in x does.
        config: block sizes.
        cores: multiprocessors; each runs one thread block.
        through: dtype that decoded values are rounded to before x's; None for none.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    given_rows, summed = x.shape
    x = jnp.pad(x, ((0, -given_rows % 8), (0, 0)))  # TMA takes whole rows of swizzled tiles
    rows = x.shape[0]
    columns = 2 * codes.shape[1] if gradient else codes.shape[0]
    _share_of_registers(config)
    work = Work.of(rows, columns, summed, config, BLOCK, cores)
    consumers, part_rows = config.consumers, config.rows // config.consumers
    w_shape = (BLOCK, config.columns) if gradient else (config.columns, BLOCK)
    scratch = {
        "x_smem": plgpu.SMEM((config.x_stages, consumers, part_rows, BLOCK), x.dtype, transforms=_TRANSFORMS),
        "w_smem": plgpu.SMEM((config.w_stages, *w_shape), x.dtype, transforms=_TRANSFORMS),
        "out_smem": plgpu.SMEM((consumers, config.columns // 64, 64, 64), x.dtype, transforms=_TRANSFORMS),
        "x_full": plgpu.Barrier(num_barriers=config.x_stages, num_arrivals=consumers),
        "x_free": plgpu.Barrier(num_barriers=config.x_stages, num_arrivals=consumers),
        "w_full": plgpu.Barrier(num_barriers=config.w_stages, num_arrivals=DECODERS),
        "w_free": plgpu.Barrier(num_barriers=config.w_stages, num_arrivals=consumers),
    }
    body = functools.partial(
        _kernel,
        names=tuple(scratch),
        work=work,
        gradient=gradient,
        config=config,
        through=through,
        interpreted=interpret is not None,
    )
    parts = (work.ctas if work.cut else 1, config.rows, config.columns)
    out, _ = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, columns), x.dtype),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        scratch_types=tuple(scratch.values()),
        grid=(work.ctas,),
        grid_names=("cta",),
        num_threads=consumers + DECODERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="nf4_fused_gradient" if gradient else "nf4_fused",
        interpret=interpret,
    )(x, codes, absmax)
    return out[:given_rows]


def _kernel(
    x,
    codes,
    absmax,
    out,
    parts,
    *scratch,
    names,
    work: Work,
    gradient: bool,
    config: FusedConfig,
    through: str | None,
    interpreted: bool,
):
    refs = types.SimpleNamespace(
        x=x, codes=codes, absmax=absmax, out=out, parts=parts, **dict(zip(names, scratch, strict=True))
    )
    cta, warpgroup, consumers = lax.axis_index("cta"), lax.axis_index("warpgroup"), config.consumers
    place, total = functools.partial(work.place, cta), work.begin(cta + 1) - work.begin(cta)
    # The interpreter runs thread blocks in order: nobody waits there.
    shared = work.cut and not interpreted
    done = pl.get_global(plgpu.SemaphoreType.REGULAR((work.ctas,))) if shared else None

    @pl.when(warpgroup < consumers)
    def _():
        _set_registers(config.consumer_registers, config)

        def multiply(turn, count):
            segment = work.segment(cta, turn)
            sums, count = _multiply(refs, segment, warpgroup, count, gradient, config)
            _write(refs, work, done, segment, sums, cta, warpgroup, config, interpreted)
            return count

        lax.fori_loop(0, work.segments(cta), multiply, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    for decoder in range(DECODERS):

        @pl.when(warpgroup == consumers + decoder)
        def _(decoder=decoder):
            _set_registers(config.decoder_registers, config)
            _decode(refs, place, total, decoder, gradient, config, through, interpreted)

    @pl.when(warpgroup == consumers + DECODERS)
    def _():
        _set_registers(_PRODUCER_REGISTERS, config)
        _load(refs, place, total, config)


def _share_of_registers(config: FusedConfig) -> int:
    """The registers that every thread starts with.

    Raises:
        ValueError: the warpgroups want more together, of which the last would wait forever.
    """
    warpgroups = config.consumers + DECODERS + 1
    share = _REGISTERS // (128 * warpgroups) // 8 * 8
    parts = config.consumers * config.consumer_registers, DECODERS * config.decoder_registers, _PRODUCER_REGISTERS
    if sum(parts) > warpgroups * share:
        raise ValueError(f"{config}: {warpgroups} warpgroups share {warpgroups * share} registers, not {sum(parts)}")
    return share


def _set_registers(count: int, config: FusedConfig):
    """Take registers for the threads of a warpgroup, or give some back."""
    share = _share_of_registers(config)
    plgpu.set_max_registers(count, action="increase" if count > share else "decrease")


def _load(refs, place, total, config: FusedConfig):
    """What the loading warpgroup does."""
    part_rows = config.rows // config.consumers

    def load(count, _):
        slot = lax.rem(count, jnp.int32(config.x_stages))
        row, _, term = place(count)
        pl.when(count >= config.x_stages)(lambda: plgpu.barrier_wait(refs.x_free.at[slot]))
        for part in range(config.consumers):
            source = refs.x.at[pl.ds(row + part * part_rows, part_rows), pl.ds(term, BLOCK)]
            plgpu.copy_gmem_to_smem(source, refs.x_smem.at[slot, part], refs.x_full.at[slot])
        return None

    lax.fori_loop(0, total, load, None)


def _decode(
    refs, place, total, decoder: int, gradient: bool, config: FusedConfig, through: str | None, interpreted: bool
):
    """What a decoding warpgroup does: every DECODERS-th of a tile's units, which are 64 blocks below each other."""
    units = range(decoder, config.columns // BLOCK, DECODERS)

    def load(count):
        _, column, term = place(lax.min(count, total - 1))
        loaded = []
        for unit in units:
            first, block = (term, column + unit * BLOCK) if gradient else (column + unit * BLOCK, term)
            rows, block = pl.ds(first, 64), lax.div(block, jnp.int32(BLOCK))
            codes = refs.codes.at[rows, pl.ds(block * BLOCK_BYTES, BLOCK_BYTES)]
            absmax = refs.absmax.at[rows, block]
            if interpreted:
                loaded.append((codes[...], absmax[...]))
            else:
                loaded.append((compat.mosaic_load(codes, _CODES), compat.mosaic_load(absmax, _CODES.reduce(1))))
        return loaded

    def decode(count, ahead):
        ahead = [*ahead, load(count + config.ahead)]
        slot = lax.rem(count, jnp.int32(config.w_stages))
        w_smem = refs.w_smem.at[slot]
        decoded = [_look_up(codes, absmax, w_smem.dtype, through, interpreted) for codes, absmax in ahead[0]]
        pl.when(count >= config.w_stages)(lambda: plgpu.barrier_wait(refs.w_free.at[slot]))
        for unit, values in zip(units, decoded, strict=True):
            part = pl.ds(unit * BLOCK, BLOCK)
            (w_smem.at[:, part] if gradient else w_smem.at[part])[...] = values
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.w_full.at[slot])
        return ahead[1:]

    lax.fori_loop(0, total, decode, [load(jnp.int32(count)) for count in range(config.ahead)])


def _look_up(codes, absmax, dtype, through: str | None, interpreted: bool):
    """64 decoded blocks."""
    if interpreted:
        halves = [ptx.lookup_in_jax(codes, absmax[:, None], dtype, half, through) for half in ptx.HALVES]
        return jnp.concatenate(halves, axis=1)

    @plgpu.inline_mgpu(
        arg_types=(_CODES, _CODES.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct((64, BLOCK), dtype, layout=_DECODED),
    )
    def look_up(_, codes, absmax):
        layout = _DECODED.to_mgpu()
        absmax = absmax.broadcast_in_dim(codes.shape, (0,), codes.layout).registers.reshape(2)
        decoded = np.empty((2, 2), object)  # half, eight bytes
        for part, packed in enumerate(codes.registers.reshape(2)):
            scale = vector.extract(absmax[part], [], [0])
            words = [look_up_word(word, scale, dtype, through) for word in words_of(packed)]
            for half in range(2):
                decoded[half, part] = joined([register for word in words for register in word[half]], dtype)
        registers = decoded.reshape(layout.registers_shape((64, BLOCK)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return look_up(codes, absmax)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _multiply(refs, segment: Segment, consumer, count, gradient: bool, config: FusedConfig):
    """What a multiplying warpgroup does with a tile: its sums, and how many steps it has taken in all."""

    def release(count):
        plgpu.barrier_arrive(refs.x_free.at[lax.rem(count, jnp.int32(config.x_stages))])
        plgpu.barrier_arrive(refs.w_free.at[lax.rem(count, jnp.int32(config.w_stages))])

    def products(sums_ref):
        def step(index, count):
            x_slot, w_slot = (lax.rem(count, jnp.int32(n)) for n in (config.x_stages, config.w_stages))
            plgpu.barrier_wait(refs.x_full.at[x_slot])
            plgpu.barrier_wait(refs.w_full.at[w_slot])
            weights = refs.w_smem.at[w_slot]
            plgpu.wgmma(sums_ref, refs.x_smem.at[x_slot, consumer], weights if gradient else weights.T)
            plgpu.wgmma_wait(1)
            pl.when(index > segment.begin)(lambda: release(count - 1))
            return count + 1

        end = lax.fori_loop(segment.begin, segment.end, step, count)
        sums = sums_ref[...]
        release(end - 1)
        return sums, end

    part_rows = config.rows // config.consumers
    accumulator = plgpu.ACC((part_rows, config.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(products, accumulator)


def _write(refs, work: Work, done, segment: Segment, sums, cta, consumer, config: FusedConfig, interpreted: bool):
    """Hand the sums of a tile's first part on; or add what was handed on, and write the tile."""
    part_rows = config.rows // config.consumers
    pieces = [(row, column) for row in range(0, part_rows, 64) for column in range(0, config.columns, 64)]

    def part(cta, row, column):
        return refs.parts.at[cta, pl.ds(consumer * part_rows + row, 64), pl.ds(column, 64)]

    def hand_on():
        for row, column in pieces:
            part(cta, row, column)[...] = sums[row : row + 64, column : column + 64]
        if done is not None:
            fence()
            pl.semaphore_signal(done.at[cta])

    def finish():
        first = work.owner(segment.tile * work.steps)
        if done is not None:

            def wait(cta, _):
                # Neither warpgroup takes the other's signal away.
                pl.semaphore_wait(done.at[cta], config.consumers, decrement=False)

            lax.fori_loop(first, cta, wait, None)

        def add(column, row):
            def add_one(cta, total):
                found = part(cta, row, column)
                return total + (found[...] if interpreted else compat.mosaic_load(found, plgpu.Layout.WGMMA))

            total = sums[row : row + 64, column : column + 64]
            return lax.fori_loop(first, cta, add_one, total) if work.cut else total

        for row in range(0, part_rows, 64):
            rows = pl.ds(segment.row + consumer * part_rows + row, 64)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for column in range(0, config.columns, 64):
                out_smem = refs.out_smem.at[consumer, column // 64]
                out_smem[...] = add(column, row).astype(out_smem.dtype)
            plgpu.commit_smem()
            for column in range(0, config.columns, 64):
                target = refs.out.at[rows, pl.ds(segment.column + column, 64)]
                store = functools.partial(plgpu.copy_smem_to_gmem, refs.out_smem.at[consumer, column // 64], target)
                # What a tile that was moved back shares with its neighbour, the neighbour writes: it may have been cut
                # elsewhere, so that its sums differ by roundings.
                pl.when(segment.column + column >= work.own_column(segment.tile))(store)

    if work.cut:
        pl.when(segment.end < work.steps)(hand_on)
        pl.when(segment.end == work.steps)(finish)
    else:
        finish()


def fence():
    """What any thread of the warpgroup has written is seen before what one of them writes next."""

    @plgpu.inline_mgpu()
    def fence(_):
        mgpu.utils.warpgroup_barrier()
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True)

    fence()  # pyright: ignore[reportCallIssue]  # the decorator takes the context away
