"""Stages of `matvec`: codes, scales and x of some columns on their way into shared memory, and the table.

Codes and x lie in lines of 128 bytes, whose eight pieces change places by the line's number modulo eight (exclusive
or), as TMA swizzles.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from pallas_kernels.nf4.codebook import BLOCK
from pallas_kernels.nf4.config import MATVEC_GRAIN
from pallas_kernels.nf4.mosaic_sm90.matvec_plan import ENTRY, SEGMENT, Plan
from pallas_kernels.nf4.mosaic_sm90.words import Thread, Word, assemble, at, load_words

_SCALES = MATVEC_GRAIN // BLOCK


def scratch(plan: Plan, dtype) -> dict:
    """Shared memory and barriers of the stages, and of the table.

    Args:
        plan: sizes.
        dtype: of x.
    """
    codes, x = transforms(plan)
    stages, segments = plan.config.stages, plan.segments
    full = plgpu.Barrier(num_barriers=stages, num_arrivals=2 * segments + plan.blocks) if plan.by_tma else None
    return {
        "table_smem": plgpu.SMEM((ENTRY * ENTRY // 4,), jnp.int32),
        "codes_smem": plgpu.SMEM((stages, segments, plan.rows, SEGMENT), jnp.uint8, transforms=codes),
        "scales_smem": plgpu.SMEM((stages, segments, plan.rows, _SCALES), jnp.float32),
        "x_smem": plgpu.SMEM((stages, plan.blocks, plan.tokens, BLOCK), dtype, transforms=x),
        "items_smem": plgpu.SMEM((plan.items, 1 + plan.tokens), jnp.int32) if plan.items else None,
        "full": full,
    }


def transforms(plan: Plan) -> tuple[tuple, tuple]:
    """Transforms of the codes and of x in shared memory; none where threads copy by cp.async."""
    if not plan.by_tma:
        return (), ()
    tilings = (plgpu.TilingTransform((8, SEGMENT)), plgpu.TilingTransform((8, BLOCK)))
    return tuple((tiling, plgpu.SwizzleTransform(128)) for tiling in tilings)  # pyright: ignore[reportReturnType]


def load(refs, plan: Plan, block, total, iteration) -> None:
    """Begin to copy a thread block's `iteration`th stage of `total`; nothing behind the last."""
    slot = lax.rem(iteration, jnp.int32(plan.config.stages))
    item, first, split = plan.unit(block, lax.div(iteration, jnp.int32(plan.steps)))
    column = (split * plan.steps + lax.rem(iteration, jnp.int32(plan.steps))) * plan.columns
    if plan.by_tma:
        mine = jnp.logical_and(iteration < total, lax.axis_index("warpgroup") == 0)
        pl.when(mine)(lambda: _load_by_tma(refs, plan, slot, first, column))
        return
    pl.when(iteration < total)(lambda: _load_by_threads(refs, plan, slot, item, first, column))
    _commit()


def wait(refs, plan: Plan, iteration) -> None:
    """Wait until a stage is there for all threads, and until all of them have read the one before it."""
    if plan.by_tma:
        plgpu.barrier_wait(refs.full.at[lax.rem(iteration, jnp.int32(plan.config.stages))])

    @plgpu.inline_mgpu()
    def wait(_):
        if not plan.by_tma:  # of the thread's groups of copies, all but the latest
            assemble(f"cp.async.wait_group {plan.config.stages - 2};", [], "", effects=True)
        gpu.barrier()

    wait()  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _load_by_tma(refs, plan: Plan, slot, first, column) -> None:
    """Copies by one thread. TMA makes zeros of what is behind the columns, scales among it."""
    full, rows, own = refs.full.at[slot], pl.ds(first, plan.rows), lax.div(column, jnp.int32(BLOCK))
    for number in range(plan.segments):
        codes = refs.codes.at[rows, pl.ds(own * (BLOCK // 2) + number * SEGMENT, SEGMENT)]
        plgpu.copy_gmem_to_smem(codes, refs.codes_smem.at[slot, number], full)
        scales = refs.absmax.at[rows, pl.ds(own + number * _SCALES, _SCALES)]
        plgpu.copy_gmem_to_smem(scales, refs.scales_smem.at[slot, number], full)
    for number in range(plan.blocks):
        x = refs.x.at[:, pl.ds(column + number * BLOCK, BLOCK)]
        plgpu.copy_gmem_to_smem(x, refs.x_smem.at[slot, number], full)


def _load_by_threads(refs, plan: Plan, slot, item, first, column) -> None:
    """Copies of 16 bytes by all threads; zeros of what is behind the columns."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *(plgpu.RefType(),) * (7 if plan.items else 6)))
    def load(_, column, *refs):
        column = Word(column.registers.item())
        codes, absmax, x, codes_smem, scales_smem, x_smem, *item = map(mgpu.utils.memref_ptr, refs)
        copies = _Copies(plan, column)

        def copy_codes(number: Word):
            piece, line = number & 7, number >> 3
            row, segment = line % plan.rows, line // plan.rows
            source = row * (plan.summed // 2) + segment * SEGMENT + piece * 16
            behind = segment * MATVEC_GRAIN + piece * 32
            copies.copy(codes, source, codes_smem, line * SEGMENT + (piece ^ (row & 7)) * 16, behind)

        def copy_scales(number: Word):
            row, segment = number % plan.rows, number // plan.rows
            source = row * (plan.summed // BLOCK * 4) + segment * 16
            copies.copy(absmax, source, scales_smem, number * 16, segment * MATVEC_GRAIN)

        def copy_x(number: Word):
            piece, line = number & 7, number >> 3
            token, block = line % plan.tokens, line // plan.tokens
            row = row_of(item, token)
            source = (row // plan.shared) * (plan.summed * 2) + block * (2 * BLOCK) + piece * 16
            place = line * 128 + (piece ^ (token & 7)) * 16
            copies.copy(x, source, x_smem, place, block * BLOCK, row if item else None)

        copies.each(plan.rows * plan.columns // 32, copy_codes)
        copies.each(plan.rows * plan.segments, copy_scales)
        copies.each(plan.tokens * plan.columns // 8, copy_x)

    rows = pl.ds(first, plan.rows)
    matrix, own = ((refs.items_smem[item, 0],), (refs.items_smem.at[item],)) if plan.items else ((), ())
    sources = (
        refs.codes.at[*matrix, rows, pl.ds(lax.div(column, jnp.int32(2)), plan.columns // 2)],
        refs.absmax.at[*matrix, rows, pl.ds(lax.div(column, jnp.int32(BLOCK)), plan.blocks)],
        refs.x.at[:, pl.ds(column, plan.columns)],
    )
    targets = refs.codes_smem.at[slot], refs.scales_smem.at[slot], refs.x_smem.at[slot]
    load(column, *sources, *targets, *own)  # pyright: ignore[reportCallIssue]


def copy_items(refs, plan: Plan) -> None:
    """Copy the items into shared memory, where they are read for every stage."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def copy(_, items, items_smem):
        source, target = map(mgpu.utils.memref_ptr, (items, items_smem))
        threads, thread = 32 * plan.config.warps, Word(mgpu.utils.thread_idx())
        for start in range(0, plan.items * (1 + plan.tokens), threads):
            with mgpu.utils.when((thread + start).below(plan.items * (1 + plan.tokens))):
                place = (thread + start) * 4
                (word,) = load_words(source, place, 1)
                llvm.store(word, at(target, place), alignment=4)
        gpu.barrier()

    copy(refs.items, refs.items_smem)  # pyright: ignore[reportCallIssue]


def row_of(item: Sequence[ir.Value], token: Word) -> Word:
    """The number of a row, -1 where there is none.

    Args:
        item: pointer to the item; none where all rows have one matrix, and their places are their numbers.
        token: place of the row.
    """
    return Word(*load_words(item[0], (token + 1) * 4, 1)) if item else token


def _commit() -> None:
    """Close the thread's group of copies, an empty one behind the last stage."""

    @plgpu.inline_mgpu()
    def commit(_):
        assemble("cp.async.commit_group;", [], "", effects=True)

    commit()  # pyright: ignore[reportCallIssue]


class _Copies:
    """Copies of 16 bytes by the threads of a block, side by side.

    Attributes:
        plan: sizes.
        column: the stage's first.
    """

    def __init__(self, plan: Plan, column: Word):
        self.plan, self.column = plan, column

    def each(self, count: int, copy) -> None:
        """Call `copy` for each number below `count`."""
        threads, thread = 32 * self.plan.config.warps, Word(mgpu.utils.thread_idx())
        for start in range(0, count, threads):
            if start + threads <= count:
                copy(thread + start)
            else:
                with mgpu.utils.when((thread + start).below(count)):
                    copy(thread + start)

    def copy(
        self, array: ir.Value, source: Word, target: ir.Value, place: Word, behind: Word, row: Word | None = None
    ) -> None:
        """Begin a copy, or none of row -1; of zeros where its column, `behind` the stage's first, is behind the last.

        A branch could leave a warp's threads apart, which its matrix instructions need together.
        """
        plan, size = self.plan, Word.of(16)
        if plan.steps * plan.config.splits * plan.columns != plan.summed:
            inside = (self.column + behind).below(plan.summed)
            size = Word(arith.select(inside, size.value, Word.of(0).value))
        pointer = llvm.ptrtoint(ir.IntegerType.get_signless(32), at(target, place))
        text, operands = (
            "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;",
            [pointer, at(array, source), size.value],
        )
        if row is None:
            assemble(text, operands, "r,l,r", effects=True)
            return
        text = f"{{ .reg .pred present; setp.ne.s32 present, $3, -1; @present {text} }}"
        assemble(text, [*operands, row.value], "r,l,r,r", effects=True)


_ENTRIES = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def own_entries(plan: Plan, table) -> jax.Array:
    """The table's entry of each lane's number among those of its warp; asked for before the stages."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_ENTRIES)
    )
    def load(_, table):
        share, me = 256 // plan.config.warps, Thread(plan.config.column_warps)
        own = load_words(mgpu.utils.memref_ptr(table), (me.warp * share + me.lane % share) * 4, 1)
        register = np.empty(1, object)
        register[0] = vector.from_elements(ir.VectorType.get((1,), own[0].type), own)
        return mgpu.FragmentedArray(_registers=register, _layout=_ENTRIES.to_mgpu(), _is_signed=True)

    return load(table)  # pyright: ignore[reportCallIssue]


def fill_table(plan: Plan, entries: jax.Array, table_smem) -> None:
    """Write the table: each warp its share of the entries, each of them for all lanes."""

    @plgpu.inline_mgpu(arg_types=(_ENTRIES, plgpu.RefType()))
    def fill(_, entries, table_smem):
        i32, share = ir.IntegerType.get_signless(32), 256 // plan.config.warps
        me, own = Thread(plan.config.column_warps), vector.extract(entries.registers.item(), [], [0])
        for entry in range(share):
            value = assemble(f"shfl.sync.idx.b32 $0, $1, {entry}, 31, -1;", [own], "=r,r", i32, effects=True)
            place = (me.warp * share + entry) * ENTRY + me.lane * 4
            llvm.store(value, at(mgpu.utils.memref_ptr(table_smem), place), alignment=4)

    fill(entries, table_smem)  # pyright: ignore[reportCallIssue]
