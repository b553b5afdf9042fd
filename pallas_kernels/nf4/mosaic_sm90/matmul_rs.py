"""y = x Wᵀ and dx = dy W for up to some hundred rows, transposed: decoded weights are wgmma's register operand (RS).

A persistent kernel of three warpgroups: one loads (TMA), two decode and multiply (wgmma), each 64 rows of W for
yᵀ = W xᵀ, or 64 columns for dxᵀ = Wᵀ dyᵀ, with all of a tile's rows of x. While the tensor cores work on 64 terms of
the sum, the threads decode the next 64. Two thread blocks of a cluster share the rows of x, each loads half of them for
both. Tiles are shared out by Stream-K (`stream_k`).

Prediction for an iteration of 128 × 256 × 64 on a Hopper multiprocessor, in cycles: the tensor cores take 1,024; shared
memory moves 64 KB to them and 36 KB into it, 800, and 32 KB more for the gradient, 1,060; decoding takes 4.1
instructions a code, half of them at half rate, and 390 issue slots of each of the four schedulers with all that is
around it. From the L2 cache come 16 bytes of x a cycle and multiprocessor, 32 without clusters. Measured, decoding is
not hidden: it adds 13 to 16% to the product of 512 rows and 24% to the gradient (docs/lab/nf4.md).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt8

from pallas_kernels import compat
from pallas_kernels.mosaic import launch, stay
from pallas_kernels.nf4.codebook import BLOCK
from pallas_kernels.nf4.config import MatmulRsConfig
from pallas_kernels.nf4.mosaic_sm90.operand import CODES_TRANSFORMS, ROWS, decode, decode_transposed, load
from pallas_kernels.nf4.mosaic_sm90.stream_k import Segment, StreamK, fence

_CONSUMERS = 2
_COLUMNS = _CONSUMERS * ROWS
"""Columns of the result in a thread block's tile: rows of W, or columns for the gradient."""
_SCALES = 4
"""Scales of a row that are loaded with a step: 16 bytes; two are needed."""
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40
_X_STAGES, _W_STAGES = 4, 3
"""Pieces of x, of 64 columns, and of codes, of 128 columns, in shared memory."""
_SWIZZLED = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("gradient", "config", "cores", "through", "interpret"))
def matmul_rs(
    x: Float[Array, "rows summed"],
    codes: UInt8[Array, "out half_in"],
    absmax: Float[Array, "out blocks"],
    *,
    gradient: bool,
    config: MatmulRsConfig,
    cores: int,
    through: str | None = None,
    interpret: Any = None,
) -> Float[Array, "rows columns"]:
    """The product of x with a packed matrix transposed, or with the matrix itself; summed in float32.

    Args:
        x: bfloat16 or float16, [rows, in]; [rows, out] for the gradient. `in` is a multiple of RS_GRAIN.
        codes: uint8, split order; `out` a multiple of 64, or of RS_TERMS for the gradient; the dimension that is
            not summed over at least config.columns.
        absmax: float32.
        gradient: multiply with the matrix as it is, as the gradient in x does.
        config: block sizes; the interpreter takes no clusters.
        cores: multiprocessors; each runs one thread block.
        through: dtype that decoded values are rounded to before x's; None for none.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    (all_rows, summed), cluster = x.shape, config.cluster
    columns = 2 * codes.shape[1] if gradient else codes.shape[0]
    x = jnp.pad(x, ((0, -all_rows % 8), (0, 0)))  # TMA takes whole rows of swizzled tiles
    rows = x.shape[0]
    schedule = StreamK.of(rows, columns, summed, config, cores // cluster)
    free = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",)) if cluster > 1 else plgpu.Barrier
    scratch = {
        "x_smem": plgpu.SMEM((_X_STAGES, config.rows, BLOCK), x.dtype, transforms=_SWIZZLED),
        # Of two rows of 64 rows of W, two blocks: a consumer takes one of the rows, or one of the blocks.
        "codes_smem": plgpu.SMEM((_W_STAGES, 2, ROWS, BLOCK), jnp.uint8, transforms=CODES_TRANSFORMS),
        "absmax_smem": plgpu.SMEM((_W_STAGES, 2, ROWS, _SCALES), jnp.float32),
        "exchange": plgpu.SMEM((_CONSUMERS, 2, ROWS if gradient else 1, BLOCK), x.dtype),
        "out_smem": plgpu.SMEM((_CONSUMERS, 2, 64, ROWS), x.dtype, transforms=_SWIZZLED),
        "x_full": plgpu.Barrier(num_barriers=_X_STAGES),
        "x_free": free(num_barriers=_X_STAGES, num_arrivals=_CONSUMERS),
        "w_full": plgpu.Barrier(num_barriers=_W_STAGES, num_arrivals=4),
        "w_free": plgpu.Barrier(num_barriers=_W_STAGES, num_arrivals=_CONSUMERS),
    }
    partials = (schedule.ctas * cluster * _CONSUMERS if schedule.needs_fixup else 1, ROWS, config.rows)
    outputs = {"out": ((rows, columns), x.dtype), "partials": (partials, jnp.float32)}
    out, _ = launch(
        functools.partial(_kernel, schedule=schedule, gradient=gradient, config=config, through=through),
        {"x": x, "codes": codes, "absmax": absmax},
        {name: jax.ShapeDtypeStruct(*described) for name, described in outputs.items()},
        scratch,
        name="nf4_matmul_rs_gradient" if gradient else "nf4_matmul_rs",
        grid=("cluster", schedule.ctas),
        threads=_CONSUMERS + 1,
        cluster=cluster,
        interpret=interpret,
    )
    return out[:all_rows]


def _kernel(refs, *, schedule: StreamK, gradient: bool, config: MatmulRsConfig, through: str | None):
    cluster, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    rank = lax.axis_index("rank") if config.cluster > 1 else 0
    total = schedule.begin(cluster + 1) - schedule.begin(cluster)
    # One flag a thread block, in global memory, zero at the start: how many of its consumers have stored partial sums.
    # The interpreter runs thread blocks in order and needs none.
    shared = schedule.needs_fixup and not refs.interpreted
    flags = pl.get_global(plgpu.SemaphoreType.REGULAR((schedule.ctas * config.cluster,))) if shared else None

    @pl.when(warpgroup < _CONSUMERS)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        segments = schedule.segments(cluster)

        def pair(segment, step):
            """Whether a step's scales are the first (0) or the second two (1) of those loaded."""
            column = lax.div(segment.column, jnp.int32(_COLUMNS)) + rank
            return lax.rem(column if gradient else step, jnp.int32(2))

        # Decoding runs half an iteration ahead of the products, across tiles too: `weights` goes from tile to tile.
        load_half = functools.partial(_load_half, refs, warpgroup, gradient, config, through)
        decode_half = functools.partial(_decode, refs, warpgroup, gradient, through)

        def multiply(turn, carry):
            count, weights = carry
            segment = schedule.segment(cluster, turn)
            following = schedule.segment(cluster, lax.min(turn + 1, segments - 1))
            following = pair(following, following.begin)
            sums, count, weights = _multiply(
                refs, segment, pair, following, load_half, decode_half, count, weights, config
            )
            _write(refs, schedule, flags, segment, sums, cluster, rank, warpgroup, config)
            return count, weights

        first = schedule.segment(cluster, 0)
        weights = decode_half(load_half(jnp.int32(0), pair(first, first.begin), 0), 0)
        lax.fori_loop(0, segments, multiply, (jnp.int32(0), weights))
        plgpu.wait_smem_to_gmem(0)  # shared memory must outlive the last tile's stores

    @pl.when(warpgroup == _CONSUMERS)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        _load(refs, schedule, cluster, rank, total, gradient, config)


def _load(refs, schedule: StreamK, cluster, rank, total, gradient: bool, config: MatmulRsConfig):
    """The loading warpgroup: codes, scales and x of every iteration, as far ahead as there are free stages.

    W gets one iteration more than x: the consumers decode ahead, also behind the last tile. It is the last iteration
    once more, and never multiplied with.
    """

    def load(count, _):
        row, column, term = schedule.place(cluster, lax.min(count, total - 1))
        slot = lax.rem(count, jnp.int32(_W_STAGES))
        # Both consumers have read this stage's last codes. The first round of stages starts empty.
        pl.when(count >= _W_STAGES)(lambda: plgpu.barrier_wait(refs.w_free.at[slot]))
        w_row, w_column = column + rank * _COLUMNS, term
        if gradient:
            w_row, w_column = w_column, w_row
        for part in range(2):
            rows = pl.ds(w_row + part * ROWS, ROWS)
            codes = refs.codes.at[rows, pl.ds(lax.div(w_column, jnp.int32(2)), BLOCK)]
            plgpu.copy_gmem_to_smem(codes, refs.codes_smem.at[slot, part], refs.w_full.at[slot])
            absmax = refs.absmax.at[rows, pl.ds(lax.div(w_column, jnp.int32(_SCALES * BLOCK)) * _SCALES, _SCALES)]
            plgpu.copy_gmem_to_smem(absmax, refs.absmax_smem.at[slot, part], refs.w_full.at[slot])

        @pl.when(count < total)
        def _():
            for half in range(2):
                x_count = 2 * count + half
                x_slot = lax.rem(x_count, jnp.int32(_X_STAGES))
                # The products that read this stage are done, in both thread blocks of a cluster: the copy below writes
                # half of the stage here and half in the neighbour.
                pl.when(x_count >= _X_STAGES)(lambda x_slot=x_slot: plgpu.barrier_wait(refs.x_free.at[x_slot]))
                source = refs.x.at[pl.ds(row, config.rows), pl.ds(term + half * BLOCK, BLOCK)]
                axes = "rank" if config.cluster > 1 else None
                plgpu.copy_gmem_to_smem(source, refs.x_smem.at[x_slot], refs.x_full.at[x_slot], collective_axes=axes)

        return None

    lax.fori_loop(0, total + 1, load, None)
    if config.cluster > 1:
        stay(refs.x_free, 2 * total, _X_STAGES)


def _load_half(refs, consumer, gradient: bool, config: MatmulRsConfig, through: str | None, count, pair, half):
    """Codes and tables of half of the `count`th iteration, in registers; its scales are the `pair`th two."""
    slot = lax.rem(count, jnp.int32(_W_STAGES))
    if half == 0:  # one barrier for the four copies of the iteration: the second half needs no wait
        plgpu.barrier_wait(refs.w_full.at[slot])
    part, block = (half, consumer) if gradient else (consumer, half)
    codes, absmax = refs.codes_smem.at[slot, part], refs.absmax_smem.at[slot, part, :, 2 * pair + block]
    packed = load(codes, absmax, refs.x_smem.dtype, through, block, interpreted=refs.interpreted)
    if half == 1:  # all codes are in registers: the stage can be loaded anew long before they are decoded
        plgpu.barrier_arrive(refs.w_free.at[slot])
    return packed


def _decode(refs, consumer, gradient: bool, through: str | None, packed, half: int):
    """The register operand of half an iteration."""
    if gradient:  # an exchange buffer a half: the other one may still be read by a slower warp
        return decode_transposed(packed, refs.exchange.at[consumer, half], through, interpreted=refs.interpreted)
    return decode(packed, refs.x_smem.dtype, through, interpreted=refs.interpreted)


def _multiply(refs, segment: Segment, pair, following, load_half, decode_half, count, weights, config: MatmulRsConfig):
    """A tile's sums [64, rows], the iterations taken in all, and the decoded first half of the next one."""

    def release(x_count):
        plgpu.barrier_arrive(refs.x_free.at[lax.rem(x_count, jnp.int32(_X_STAGES))])

    def products(sums_ref):
        def multiply(x_count, weights, *following):
            """Issue a product, load the codes to decode next, and wait for the product before this one."""
            slot = lax.rem(x_count, jnp.int32(_X_STAGES))
            plgpu.barrier_wait(refs.x_full.at[slot])
            plgpu.wgmma(sums_ref, weights, refs.x_smem.at[slot].T)
            packed = load_half(*following)
            # One product stays in flight, so that the tensor cores work while the caller decodes. The one before is
            # done: its x may be released, and its registers of weights may be written.
            plgpu.wgmma_wait(1)
            return packed

        def step(index, carry):
            count, weights = carry
            packed = multiply(2 * count, weights, count, pair(segment, index), 1)
            # In a tile's first iteration the product before was the last tile's, which released its own x.
            pl.when(index > segment.begin)(lambda: release(2 * count - 1))
            next_pair = lax.select(index + 1 < segment.end, pair(segment, index + 1), following)
            packed = multiply(2 * count + 1, decode_half(packed, 1), count + 1, next_pair, 0)
            release(2 * count)
            return count + 1, decode_half(packed, 0)

        end, following_weights = lax.fori_loop(segment.begin, segment.end, step, (count, weights))
        sums = sums_ref[...]  # waits for the product in flight
        release(2 * end - 1)
        return sums, end, following_weights

    accumulator = plgpu.ACC((ROWS, config.rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(products, accumulator)


def _write(
    refs,
    schedule: StreamK,
    flags,
    segment: Segment,
    sums,
    cluster,
    rank,
    consumer,
    config: MatmulRsConfig,
):
    """Store the partial sums of a tile that ends elsewhere; or fix a tile up with those of others, and write it."""

    def partial(cluster):
        return refs.partials.at[(cluster * config.cluster + rank) * _CONSUMERS + consumer]

    def store_partial():
        partial(cluster)[...] = sums
        if flags is not None:
            fence()  # the sums are visible on the device before the flag is
            pl.semaphore_signal(flags.at[cluster * config.cluster + rank])

    column = segment.column + rank * _COLUMNS + consumer * ROWS

    def finish():
        first = schedule.cta_of(segment.tile * schedule.iterations)
        if flags is not None:

            def wait(cluster, _):
                # Both consumers' signals, though each needs its own alone: one flag counts for both, and neither
                # takes the other's signal away.
                pl.semaphore_wait(flags.at[cluster * config.cluster + rank], _CONSUMERS, decrement=False)

            lax.fori_loop(first, cluster, wait, None)

        def add(cluster, total):
            sums_ref = partial(cluster)
            return total + (sums_ref[...] if refs.interpreted else compat.mosaic_load(sums_ref, plgpu.Layout.WGMMA))

        total = lax.fori_loop(first, cluster, add, sums) if schedule.needs_fixup else sums
        for number, row in enumerate(range(0, config.rows, 64)):
            out_smem = refs.out_smem.at[consumer, number % 2]
            values = total[:, row : row + 64].astype(out_smem.dtype)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # of two buffers the other one's store may be in flight
            if refs.interpreted:
                out_smem[...] = values.T
            else:
                out_smem.T[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, refs.out.at[pl.ds(segment.row + row, 64), pl.ds(column, ROWS)])

    # Where a tile that was moved back overlaps its neighbour, the neighbour writes: it may be cut elsewhere, so that
    # its sums differ by roundings.
    own = column >= schedule.own_column(segment.tile)
    if schedule.needs_fixup:
        pl.when(segment.end < schedule.iterations)(store_partial)
        own = jnp.logical_and(own, segment.end == schedule.iterations)
    pl.when(own)(finish)
