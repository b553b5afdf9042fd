"""y = x Wᵀ and dx = dy W for some hundred rows: both operands of wgmma in shared memory (SS), W decoded into it.

A persistent kernel of five warpgroups: one loads x (TMA), two decode W, two multiply (wgmma). A tile of the result is,
say, 256 × 128; an iteration takes 64 terms of its sum; tiles are shared out by Stream-K (`stream_k`). The decoding
warpgroups read codes and scales straight from global memory, some iterations ahead; a thread decodes half a block, 16
bytes, with one table, and writes it where the tensor cores read it: shared memory, 128-byte swizzle. The two
products differ only in the place of an iteration's codes and in the summed dimension of the decoded tile.

Prediction for an iteration of 256 × 128 × 64 on a Hopper multiprocessor, in cycles: the tensor cores take 1,024; shared
memory moves 96 KB to them, 32 KB of x and 16 KB of decoded W into it: 1,150 at 128 bytes a cycle; decoding takes 3.75
integer instructions a code and 240 issue slots of each of the four schedulers, 480 at half rate. So up to 256 rows a
tile the decoding hides behind the product, at 128 rows it nearly does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import vector
from jaxtyping import Array, Float, UInt8

from pallas_kernels import compat
from pallas_kernels.mosaic import launch
from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.config import MatmulSsConfig
from pallas_kernels.nf4.mosaic_sm90.lookup import joined, look_up_word, words_of
from pallas_kernels.nf4.mosaic_sm90.stream_k import Segment, StreamK, fence

DECODERS = 2
_REGISTERS = 65536
_PRODUCER_REGISTERS = 32
_TRANSFORMS = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))


def _unit_layout(columns: int, part: tuple[int, int]):
    """Of 64 blocks below each other, codes or decoded: a lane holds half a block.

    Eight neighbouring lanes hold every other of eight rows, so that their simultaneous stores, 16 bytes each, fall into
    different banks.
    """
    tiling = plgpu.Tiling(((64, columns), (16, columns), part, (2, 16), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-9,), lane_dims=(-7, -3, -5, -2), vector_dim=-1)


_CODES = _unit_layout(BLOCK_BYTES, (8, BLOCK_BYTES))
_DECODED = _unit_layout(BLOCK, (8, BLOCK_BYTES))


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("gradient", "config", "cores", "through", "interpret"))
def matmul_ss(
    x: Float[Array, "rows summed"],
    codes: UInt8[Array, "out half_in"],
    absmax: Float[Array, "out blocks"],
    *,
    gradient: bool,
    config: MatmulSsConfig,
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
    all_rows, summed = x.shape
    x = jnp.pad(x, ((0, -all_rows % 8), (0, 0)))  # TMA takes whole rows of swizzled tiles
    rows = x.shape[0]
    columns = 2 * codes.shape[1] if gradient else codes.shape[0]
    _share_of_registers(config)
    schedule = StreamK.of(rows, columns, summed, config, BLOCK, cores)
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
    partials = (schedule.ctas if schedule.needs_fixup else 1, config.rows, config.columns)
    outputs = {"out": ((rows, columns), x.dtype), "partials": (partials, jnp.float32)}
    out, _ = launch(
        functools.partial(_kernel, schedule=schedule, gradient=gradient, config=config, through=through),
        {"x": x, "codes": codes, "absmax": absmax},
        {name: jax.ShapeDtypeStruct(*described) for name, described in outputs.items()},
        scratch,
        name="nf4_matmul_ss_gradient" if gradient else "nf4_matmul_ss",
        grid=("cta", schedule.ctas),
        threads=consumers + DECODERS + 1,
        interpret=interpret,
    )
    return out[:all_rows]


def _kernel(refs, *, schedule: StreamK, gradient: bool, config: MatmulSsConfig, through: str | None):
    cta, warpgroup, consumers = lax.axis_index("cta"), lax.axis_index("warpgroup"), config.consumers
    place, total = functools.partial(schedule.place, cta), schedule.begin(cta + 1) - schedule.begin(cta)
    # One flag a thread block, in global memory, zero at the start: how many of its consumers have stored partial sums.
    # The interpreter runs thread blocks in order and needs none.
    shared = schedule.needs_fixup and not refs.interpreted
    flags = pl.get_global(plgpu.SemaphoreType.REGULAR((schedule.ctas,))) if shared else None

    @pl.when(warpgroup < consumers)
    def _():
        _set_registers(config.consumer_registers, config)

        def multiply(turn, count):
            segment = schedule.segment(cta, turn)
            sums, count = _multiply(refs, segment, warpgroup, count, gradient, config)
            _write(refs, schedule, flags, segment, sums, cta, warpgroup, config)
            return count

        lax.fori_loop(0, schedule.segments(cta), multiply, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)  # shared memory must outlive the last tile's stores

    for decoder in range(DECODERS):

        @pl.when(warpgroup == consumers + decoder)
        def _(decoder=decoder):
            _set_registers(config.decoder_registers, config)
            _decode(refs, place, total, decoder, gradient, config, through)

    @pl.when(warpgroup == consumers + DECODERS)
    def _():
        _set_registers(_PRODUCER_REGISTERS, config)
        _load(refs, place, total, config)


def _share_of_registers(config: MatmulSsConfig) -> int:
    """The registers that every thread starts with.

    Raises:
        ValueError: the warpgroups want more together; the last one would wait forever.
    """
    warpgroups = config.consumers + DECODERS + 1
    share = _REGISTERS // (128 * warpgroups) // 8 * 8
    parts = config.consumers * config.consumer_registers, DECODERS * config.decoder_registers, _PRODUCER_REGISTERS
    if sum(parts) > warpgroups * share:
        raise ValueError(f"{config}: {warpgroups} warpgroups share {warpgroups * share} registers, not {sum(parts)}")
    return share


def _set_registers(count: int, config: MatmulSsConfig):
    """Take registers for the threads of a warpgroup, or give some back."""
    share = _share_of_registers(config)
    plgpu.set_max_registers(count, action="increase" if count > share else "decrease")


def _load(refs, place, total, config: MatmulSsConfig):
    """The loading warpgroup: x of every iteration, as far ahead as there are free stages."""
    part_rows = config.rows // config.consumers

    def load(count, _):
        slot = lax.rem(count, jnp.int32(config.x_stages))
        row, _, term = place(count)
        # Every consumer is done with the stage. The first round of stages starts empty.
        pl.when(count >= config.x_stages)(lambda: plgpu.barrier_wait(refs.x_free.at[slot]))
        for part in range(config.consumers):
            source = refs.x.at[pl.ds(row + part * part_rows, part_rows), pl.ds(term, BLOCK)]
            plgpu.copy_gmem_to_smem(source, refs.x_smem.at[slot, part], refs.x_full.at[slot])
        return None

    lax.fori_loop(0, total, load, None)


def _decode(refs, place, total, decoder: int, gradient: bool, config: MatmulSsConfig, through: str | None):
    """A decoding warpgroup: every DECODERS-th unit of a tile; a unit is 64 blocks below each other."""
    units = range(decoder, config.columns // BLOCK, DECODERS)

    def load(count):
        _, column, term = place(lax.min(count, total - 1))
        loaded = []
        for unit in units:
            first, block = (term, column + unit * BLOCK) if gradient else (column + unit * BLOCK, term)
            rows, block = pl.ds(first, 64), lax.div(block, jnp.int32(BLOCK))
            codes = refs.codes.at[rows, pl.ds(block * BLOCK_BYTES, BLOCK_BYTES)]
            absmax = refs.absmax.at[rows, block]
            if refs.interpreted:
                loaded.append((codes[...], absmax[...]))
            else:
                loaded.append((compat.mosaic_load(codes, _CODES), compat.mosaic_load(absmax, _CODES.reduce(1))))
        return loaded

    def decode(count, ahead):
        # Codes come from global memory into registers, `config.ahead` iterations before they are decoded: no barrier
        # says that they are there, the registers do.
        ahead = [*ahead, load(count + config.ahead)]
        slot = lax.rem(count, jnp.int32(config.w_stages))
        w_smem = refs.w_smem.at[slot]
        decoded = [_look_up(codes, absmax, w_smem.dtype, through, refs.interpreted) for codes, absmax in ahead[0]]
        # Every consumer's product with this stage is done. Decoding above needs no stage, so it comes first.
        pl.when(count >= config.w_stages)(lambda: plgpu.barrier_wait(refs.w_free.at[slot]))
        for unit, values in zip(units, decoded, strict=True):
            part = pl.ds(unit * BLOCK, BLOCK)
            (w_smem.at[:, part] if gradient else w_smem.at[part])[...] = values
        plgpu.commit_smem()  # plain stores become visible to wgmma, which reads by the asynchronous proxy
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


def _multiply(refs, segment: Segment, consumer, count, gradient: bool, config: MatmulSsConfig):
    """A multiplying warpgroup's sums of a tile, and the iterations it has taken in all."""

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
            # One product stays in flight; the one before is done, and its stages are released. In a tile's first
            # iteration that was the last tile's, which released its own.
            plgpu.wgmma_wait(1)
            pl.when(index > segment.begin)(lambda: release(count - 1))
            return count + 1

        end = lax.fori_loop(segment.begin, segment.end, step, count)
        sums = sums_ref[...]  # waits for the product in flight
        release(end - 1)
        return sums, end

    part_rows = config.rows // config.consumers
    accumulator = plgpu.ACC((part_rows, config.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(products, accumulator)


def _write(refs, schedule: StreamK, flags, segment: Segment, sums, cta, consumer, config: MatmulSsConfig):
    """Store the partial sums of a tile that ends elsewhere; or fix a tile up with those of others, and write it."""
    part_rows = config.rows // config.consumers
    pieces = [(row, column) for row in range(0, part_rows, 64) for column in range(0, config.columns, 64)]

    def partial(cta, row, column):
        return refs.partials.at[cta, pl.ds(consumer * part_rows + row, 64), pl.ds(column, 64)]

    def store_partial():
        for row, column in pieces:
            partial(cta, row, column)[...] = sums[row : row + 64, column : column + 64]
        if flags is not None:
            fence()  # the sums are visible on the device before the flag is
            pl.semaphore_signal(flags.at[cta])

    def finish():
        first = schedule.cta_of(segment.tile * schedule.iterations)
        if flags is not None:

            def wait(cta, _):
                # Every consumer's signal, though each needs its own alone: one flag counts for all, and none takes
                # another's signal away.
                pl.semaphore_wait(flags.at[cta], config.consumers, decrement=False)

            lax.fori_loop(first, cta, wait, None)

        def add(column, row):
            def add_one(cta, total):
                found = partial(cta, row, column)
                return total + (found[...] if refs.interpreted else compat.mosaic_load(found, plgpu.Layout.WGMMA))

            total = sums[row : row + 64, column : column + 64]
            return lax.fori_loop(first, cta, add_one, total) if schedule.needs_fixup else total

        for row in range(0, part_rows, 64):
            rows = pl.ds(segment.row + consumer * part_rows + row, 64)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last rows' stores have read the buffers
            for column in range(0, config.columns, 64):
                out_smem = refs.out_smem.at[consumer, column // 64]
                out_smem[...] = add(column, row).astype(out_smem.dtype)
            plgpu.commit_smem()
            for column in range(0, config.columns, 64):
                target = refs.out.at[rows, pl.ds(segment.column + column, 64)]
                store = functools.partial(plgpu.copy_smem_to_gmem, refs.out_smem.at[consumer, column // 64], target)
                # Where a tile that was moved back overlaps its neighbour, the neighbour writes: it may be cut
                # elsewhere, so that its sums differ by roundings.
                pl.when(segment.column + column >= schedule.own_column(segment.tile))(store)

    if schedule.needs_fixup:
        pl.when(segment.end < schedule.iterations)(store_partial)
        pl.when(segment.end == schedule.iterations)(finish)
    else:
        finish()
