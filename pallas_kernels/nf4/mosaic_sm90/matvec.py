"""y = x Wᵀ for a few rows of x, as few as one: bound by the packed bytes.

Persistent thread blocks take tiles of rows of W, or parts of their sums, and read codes, scales and x through a ring of
stages in shared memory (cp.async), across tiles too. A warp takes whole blocks of 64 columns. Its lane t of four holds
bytes 8t … 8t + 7 of a block; a byte is two codes, and a table in shared memory gives both as the pair of 16-bit values
that an operand register of the tensor cores is. The table has a column for each lane, so that lookups meet no bank
conflict; a byte's address is one byte permutation. A product sums over 16 columns in an order that is free as long as
both operands agree.

The table holds NF4's values, not scaled: sums over a block are multiplied by its absmax in float32. Times
`TABLE_SCALE` the sixteen values are nearly representable in bfloat16, so that they carry an error of 0.06%, where
weights that are rounded to bfloat16 one by one carry 0.11%.

Bounds on an H100, for 4096×14336: 33 MB at 3.0 TB/s take 11 µs; lookups take 4 µs at a conflict-free load a clock and
multiprocessor, the reading of x half as much for each eight of its rows.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array, Float, UInt8

from pallas_kernels.mosaic import launch
from pallas_kernels.nf4.codebook import BLOCK, NF4_VALUES
from pallas_kernels.nf4.config import MATVEC_GRAIN, MatvecConfig
from pallas_kernels.nf4.mosaic_sm90.words import Word, assemble, at, load_float, load_words

TABLE_SCALE = 1.437005
"""The factor between 1 and 2 with which NF4's values are rounded to bfloat16 with the smallest error."""
_TOKENS = 8
"""Rows of x in one product of the tensor cores."""
_ENTRY = 256
"""Bytes between a table's entries: a byte of codes is the second byte of its entry's place. The lanes take half."""
_SEGMENT = MATVEC_GRAIN // 2
"""Bytes of codes of a row that lie side by side in shared memory: a row of scales is then 16 bytes."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of a call.

    Attributes:
        tokens: rows of x.
        out: rows of W.
        summed: columns of W.
        config: block sizes.
        grid: thread blocks.
    """

    tokens: int
    out: int
    summed: int
    config: MatvecConfig
    grid: int

    @property
    def token_tiles(self) -> int:
        return pl.cdiv(self.tokens, _TOKENS)

    @property
    def rows(self) -> int:
        return self.config.rows

    @property
    def columns(self) -> int:
        return self.config.columns

    @property
    def units(self) -> int:
        """Tiles' parts."""
        return pl.cdiv(self.out, self.rows) * self.config.splits

    @property
    def steps(self) -> int:
        """Stages of a part."""
        return pl.cdiv(pl.cdiv(self.summed, self.columns), self.config.splits)

    @property
    def whole(self) -> bool:
        """Whether no stage reaches behind the columns."""
        return self.steps * self.config.splits * self.columns == self.summed

    @property
    def scales_place(self) -> int:
        """Bytes of a stage's codes, behind which scales lie."""
        return self.rows * self.columns // 2

    @property
    def x_place(self) -> int:
        return self.scales_place + self.rows * self.columns // BLOCK * 4

    @property
    def stage(self) -> int:
        return self.config.stage(self.tokens)

    @property
    def pieces(self) -> int:
        """Sums of 16 rows and eight tokens that a warp has."""
        return self.config.tiles * self.token_tiles


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("config", "cores", "interpret"))
def matvec(
    x: Float[Array, "rows in"],
    codes: UInt8[Array, "out half_in"],
    absmax: Float[Array, "out blocks"],
    *,
    config: MatvecConfig,
    cores: int,
    interpret: Any = None,
) -> Float[Array, "splits rows out"]:
    """The product with a packed matrix, summed in float32: its addends.

    Args:
        x: bfloat16 or float16; `in` a multiple of MATVEC_GRAIN.
        codes: uint8, split order; `out` at least `config.rows`.
        absmax: float32.
        config: block sizes.
        cores: multiprocessors; each runs one thread block.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.

    Returns:
        The product in the dtype of x, or `config.splits` addends of it in float32.
    """
    (tokens, summed), out = x.shape, codes.shape[0]
    plan = _Plan(tokens, out, summed, config, 1)
    plan = dataclasses.replace(plan, grid=min(cores, plan.units))
    dtype = x.dtype if config.splits == 1 else jnp.float32
    scratch = {
        "table_smem": plgpu.SMEM((_ENTRY * _ENTRY // 4,), jnp.int32),
        "stages": plgpu.SMEM((config.stages * plan.stage,), jnp.uint8),
        "sums": plgpu.SMEM((max(config.sums(tokens), 16),), jnp.uint8),
    }
    (product,) = launch(
        functools.partial(_kernel, plan=plan),
        {"x": x, "codes": codes, "absmax": absmax, "table": _table(x.dtype)},
        {"out": jax.ShapeDtypeStruct((config.splits, tokens, out), dtype)},
        scratch,
        name="nf4_matvec",
        grid=("block", plan.grid),
        threads=config.warps // 4,
        interpret=interpret,
    )
    return product


def _table(dtype) -> Array:
    """int32 [256]: for each byte of codes the values of its low and its high code, in this order."""
    values = jnp.asarray(NF4_VALUES * np.float32(TABLE_SCALE)).astype(dtype)
    byte = np.arange(256)
    return lax.bitcast_convert_type(jnp.stack([values[byte & 15], values[byte >> 4]], axis=1), jnp.int32)


def _kernel(refs, *, plan: _Plan):
    if refs.interpreted:
        pl.when(lax.axis_index("warpgroup") == 0)(functools.partial(_interpreted, refs, plan))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 8)
    def body(_, *refs):
        pointers = [mgpu.utils.memref_ptr(ref) for ref in refs]
        _Block(plan, pointers, ir.MemRefType(refs[0].type).element_type).run()

    body(refs.x, refs.codes, refs.absmax, refs.table, refs.out, refs.table_smem, refs.stages, refs.sums)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


class _Thread:
    """A thread's place.

    Attributes:
        number: in its thread block.
        lane: in its warp.
        row: its place among eight, along rows of W and of x.
        place: its place among four, along columns; along rows of x in the sums.
        row_warp: the warp's place along the rows of W.
        column_warp: its place along the columns.
    """

    def __init__(self, number: Word, config: MatvecConfig):
        self.number, self.lane, warp = number, number & 31, number >> 5
        self.row, self.place = self.lane >> 2, self.lane & 3
        self.row_warp, self.column_warp = warp // config.column_warps, warp % config.column_warps


class _Block:
    """A thread block, as one of its threads sees it.

    Attributes:
        plan: sizes.
        me: the thread.
        block: number of the thread block.
    """

    def __init__(self, plan: _Plan, pointers: Sequence[ir.Value], element: ir.Type):
        self.plan, self.element = plan, element
        self.x, self.codes, self.absmax, self.table, self.out, self.table_smem, self.stages, self.sums = pointers
        self.me, self.block = _Thread(Word(mgpu.utils.thread_idx()), plan.config), Word(mgpu.utils.block_idx())
        i32 = ir.IntegerType.get_signless(32)
        self.table_base = Word(llvm.ptrtoint(i32, self.table_smem))  # pyright: ignore[reportArgumentType]
        self.lane_place = self.me.lane * 4

    def run(self):
        """All of the block's units."""
        plan, stages = self.plan, self.plan.config.stages
        turns = (Word.of(plan.units + plan.grid - 1) - self.block) // plan.grid
        total = turns * plan.steps
        entry = self.own_entry()  # before the stages: behind them it would come last
        for stage in range(stages - 1):
            self.load(Word.of(stage), total)
        self.fill_table(entry)
        zeros = [mgpu.utils.c(0.0, ir.F32Type.get())] * (4 * plan.pieces)

        @mgpu.utils.fori(turns.value, [])
        def _(turn, carry):
            @mgpu.utils.fori(Word.of(plan.steps).value, zeros)
            def summed(step, sums):
                iteration = Word(turn) * plan.steps + Word(step)
                # The stage of this iteration is here, for all threads; and all have read the stage before it, into
                # which the next load goes. In flight: the stages between.
                assemble(f"cp.async.wait_group {stages - 2};", [], "", effects=True)
                gpu.barrier()
                self.load(iteration + (stages - 1), total)
                return self.add(list(sums), (iteration % stages) * plan.stage)

            self.finish(list(summed.results), self.unit(Word(turn)))
            return carry

    def unit(self, turn: Word) -> tuple[Word, Word]:
        """First row, and the part of its sum, of the block's `turn`th unit."""
        unit, splits = self.block + turn * self.plan.grid, self.plan.config.splits
        # The last tile is moved back to end with the array: it repeats what its neighbour writes.
        return ((unit // splits) * self.plan.rows).least(self.plan.out - self.plan.rows), unit % splits

    def load(self, iteration: Word, total: Word):
        """Begin to copy a stage, as one group of the thread's copies; an empty one behind the last."""
        plan = self.plan
        with mgpu.utils.when(iteration.below(total)):
            first, split = self.unit(iteration // plan.steps)
            column = (split * plan.steps + iteration % plan.steps) * plan.columns
            slot = (iteration % plan.config.stages) * plan.stage
            row_bytes, segments = plan.summed // 2, plan.columns // MATVEC_GRAIN

            def codes(number: Word):
                piece, place = number & 7, number >> 3
                row, segment = place % plan.rows, place // plan.rows
                source = (first + row) * row_bytes + (column >> 1) + segment * _SEGMENT + piece * 16
                # Rows i and i + 4 meet in the same banks; a reader's four rows do not.
                swizzled = piece ^ ((row & 3) << 1)
                target, behind = slot + place * _SEGMENT + swizzled * 16, segment * MATVEC_GRAIN + piece * 32
                self.copy(self.codes, source, target, column + behind)

            def scales(number: Word):
                row, segment = number % plan.rows, number // plan.rows
                source = (first + row) * (plan.summed // BLOCK * 4) + (column >> 4) + segment * 16
                self.copy(self.absmax, source, slot + plan.scales_place + number * 16, column + segment * MATVEC_GRAIN)

            def tokens(number: Word):
                piece, place = number & 7, number >> 3
                token, block = place % plan.tokens, place // plan.tokens
                source = token * (plan.summed * 2) + (column + block * BLOCK) * 2 + piece * 16
                swizzled = piece ^ ((token & 1) << 2)
                self.copy(self.x, source, slot + plan.x_place + place * 128 + swizzled * 16, column + block * BLOCK)

            self.each(plan.rows * plan.columns // 32, codes)
            self.each(plan.rows * segments, scales)
            self.each(plan.tokens * plan.columns // 8, tokens)
        assemble("cp.async.commit_group;", [], "", effects=True)

    def each(self, count: int, copy):
        """Call `copy` for each number below `count`, the threads side by side."""
        threads = 32 * self.plan.config.warps
        for start in range(0, count, threads):
            number = self.me.number + start
            if start + threads <= count:
                copy(number)
            else:
                with mgpu.utils.when(number.below(count)):
                    copy(number)

    def copy(self, array: ir.Value, source: Word, target: Word, column: Word):
        """Begin to copy 16 bytes; zeros where their column is behind the last."""
        i32 = ir.IntegerType.get_signless(32)
        size = Word.of(16)
        if not self.plan.whole:
            size = Word(arith.select(column.below(self.plan.summed), size.value, Word.of(0).value))
        target_pointer = llvm.ptrtoint(i32, at(self.stages, target))
        text = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
        assemble(text, [target_pointer, at(array, source), size.value], "r,l,r", effects=True)

    @property
    def share(self) -> int:
        """Entries of the table that a warp makes."""
        return 256 // self.plan.config.warps

    def own_entry(self) -> ir.Value:
        """The entry of the lane's number among those of its warp."""
        (entry,) = load_words(self.table, ((self.me.number >> 5) * self.share + self.me.lane % self.share) * 4, 1)
        return entry

    def fill_table(self, own: ir.Value):
        """Each warp writes its share of the entries, each of them for all lanes."""
        i32 = ir.IntegerType.get_signless(32)
        for entry in range(self.share):
            value = assemble(f"shfl.sync.idx.b32 $0, $1, {entry}, 31, -1;", [own], "=r,r", i32, effects=True)
            place = ((self.me.number >> 5) * self.share + entry) * _ENTRY + self.lane_place
            llvm.store(value, at(self.table_smem, place), alignment=4)

    def add(self, sums: list[ir.Value], slot: Word) -> list[ir.Value]:
        """The sums with the products of a stage."""
        plan, config = self.plan, self.plan.config
        for block in range(config.blocks):
            number = self.me.column_warp * config.blocks + block
            segment, inner = number >> 2, number & 3
            x = [self.x_words(slot, number, tile) for tile in range(plan.token_tiles)]
            for tile in range(config.tiles):
                first = (self.me.row_warp * config.tiles + tile) * 16 + self.me.row
                scales, words = [], []
                for half in range(2):
                    row = segment * plan.rows + first + 8 * half
                    place = (inner ^ (self.me.row & 3)) * 32 + self.me.place * 8
                    words.append(load_words(self.stages, slot + row * _SEGMENT + place, 2))
                    scales.append(load_float(self.stages, slot + plan.scales_place + row * 16 + inner * 4))
                products = self.products(words, x)
                for token_tile, product in enumerate(products):
                    here = 4 * (tile * plan.token_tiles + token_tile)
                    for index in range(4):
                        sums[here + index] = _fma(product[index], scales[index // 2], sums[here + index])
        return sums

    def x_words(self, slot: Word, block: Word, tile: int) -> list[tuple[ir.Value, ir.Value]]:
        """A lane's operand registers of 64 columns and eight tokens, two for each 16 columns."""
        token = self.me.row + tile * _TOKENS
        if (tile + 1) * _TOKENS > self.plan.tokens:
            token = token.least(self.plan.tokens - 1)  # sums of tokens that are not there are dropped
        place = slot + self.plan.x_place + (block * self.plan.tokens + token) * 128
        first = (token & 1) << 2  # as `load` swizzles
        low, high = (load_words(self.stages, place + ((self.me.place + 4 * half) ^ first) * 16, 4) for half in range(2))
        return [(_permute(*pair, 0x5410), _permute(*pair, 0x7632)) for pair in zip(low, high, strict=True)]

    def products(self, words, x) -> list[list[ir.Value]]:
        """Products of 16 rows and 64 columns, without scales, with each eight tokens."""
        zero = mgpu.utils.c(0.0, ir.F32Type.get())
        sums = [[zero] * 4 for _ in x]
        for step in range(4):
            weights = [
                self.look_up(words[half][step // 2], 2 * (step % 2) + byte) for byte in range(2) for half in range(2)
            ]
            sums = [
                _multiply(total, weights, tokens[step], self.element) for total, tokens in zip(sums, x, strict=True)
            ]
        return sums

    def look_up(self, word: ir.Value, byte: int) -> ir.Value:
        """The two values of one byte of codes."""
        i32 = ir.IntegerType.get_signless(32)
        place = assemble(f"prmt.b32 $0, $1, $2, 0x55{byte}4;", [word, self.lane_place.value], "=r,r,r", i32)
        address = Word(place) + self.table_base
        return assemble("ld.shared.b32 $0, [$1];", [address.value], "=r,r", i32)

    def finish(self, sums: list[ir.Value], unit: tuple[Word, Word]):
        """Add up what the warps of the same rows have, each of them some of it, and write it."""
        warps, pieces, four = self.plan.config.column_warps, self.plan.pieces, ir.VectorType.get((4,), ir.F32Type.get())
        # In a register of its own, or all places below would be computed, and kept, before the first stage.
        number = assemble("mov.b32 $0, $1;", [self.me.number.value], "=r,r", self.me.number.value.type, effects=True)
        me = _Thread(Word(number), self.plan.config)

        def place(piece: int, slot: Word | int) -> Word:
            return (((me.row_warp * pieces + piece) * (warps - 1) + Word.of(slot)) * 32 + me.lane) * 16

        for piece in range(pieces if warps > 1 else 0):
            slot = (me.column_warp + (warps - piece % warps - 1)) % warps
            with mgpu.utils.when(slot.below(warps - 1)):  # the last would be the warp's own
                llvm.store(
                    vector.from_elements(four, sums[4 * piece : 4 * piece + 4]),
                    at(self.sums, place(piece, slot)),
                    alignment=16,
                )
        if warps > 1:
            gpu.barrier()  # what is written again after the next tile, after more barriers
        for piece in range(pieces):
            with mgpu.utils.when(me.column_warp.equals(piece % warps)):
                total = sums[4 * piece : 4 * piece + 4]
                for slot in range(warps - 1):
                    others = llvm.load(four, at(self.sums, place(piece, slot)), alignment=16)
                    total = [arith.addf(total[index], vector.extract(others, [], [index])) for index in range(4)]
                self.write(me, piece, total, unit)

    def write(self, me: _Thread, piece: int, total: Sequence[ir.Value], unit: tuple[Word, Word]):
        """Write the sums of 16 rows and eight tokens."""
        plan, f32 = self.plan, ir.F32Type.get()
        tile, token_tile = divmod(piece, plan.token_tiles)
        row = unit[0] + (me.row_warp * plan.config.tiles + tile) * 16 + me.row
        for index in range(4):
            token = me.place * 2 + (token_tile * _TOKENS + index % 2)
            with mgpu.utils.when(token.below(plan.tokens)):
                value = arith.mulf(total[index], mgpu.utils.c(1 / TABLE_SCALE, f32))
                place = (unit[1] * plan.tokens + token) * plan.out + row + 8 * (index // 2)
                size = 4
                if plan.config.splits == 1:
                    value, size = arith.truncf(self.element, value), 2
                llvm.store(value, at(self.out, place * size), alignment=size)


def _permute(low: ir.Value, high: ir.Value, order: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return assemble(f"prmt.b32 $0, $1, $2, {order:#x};", [low, high], "=r,r,r", i32)


def _fma(first: ir.Value, second: ir.Value, addend: ir.Value) -> ir.Value:
    return assemble("fma.rn.f32 $0, $1, $2, $3;", [first, second, addend], "=f,f,f,f", ir.F32Type.get())


def _multiply(sums: list[ir.Value], weights: list[ir.Value], x: tuple[ir.Value, ...], element) -> list[ir.Value]:
    """A warp's product of weights [16, 16] and x [16, 8], added to sums [16, 8]."""
    f32, name = ir.F32Type.get(), str(element)
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    results = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    struct = assemble(text, [*weights, *x, *sums], constraints, results)
    return [llvm.extractvalue(f32, struct, [index]) for index in range(4)]  # pyright: ignore[reportReturnType]


def _interpreted(refs, plan: _Plan):
    """The same sums, unit for unit, without assembly."""
    block, splits = lax.axis_index("block"), plan.config.splits
    pairs = lax.bitcast_convert_type(refs.table[...], refs.x.dtype).astype(jnp.float32)

    def unit(turn, _):
        number = block + turn * plan.grid
        rows = pl.ds(
            lax.min(lax.div(number, jnp.int32(splits)) * plan.rows, jnp.int32(plan.out - plan.rows)), plan.rows
        )
        split = lax.rem(number, jnp.int32(splits))
        codes = refs.codes[rows, :].reshape(plan.rows, -1, BLOCK // 2).astype(jnp.int32)
        values = jnp.swapaxes(pairs[codes], 2, 3) * refs.absmax[rows, :][:, :, None, None]
        column = lax.iota(jnp.int32, plan.summed)
        own = lax.div(column, jnp.int32(plan.steps * plan.columns)) == split
        weights = jnp.where(own[None], values.reshape(plan.rows, plan.summed), 0.0)
        total = lax.dot_general(refs.x[...].astype(jnp.float32), weights, (((1,), (1,)), ((), ())))
        refs.out[split, :, rows] = (total / TABLE_SCALE).astype(refs.out.dtype)

    turns = lax.div(plan.units + plan.grid - 1 - block, jnp.int32(plan.grid))
    lax.fori_loop(0, turns, unit, None)
