"""Sums of `matvec`: products of a stage's codes and x, and the end of a tile."""

import contextlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from pallas_kernels.nf4.mosaic_sm90.matvec_plan import SEGMENT, TOKENS, Plan
from pallas_kernels.nf4.mosaic_sm90.matvec_stages import row_of, transforms
from pallas_kernels.nf4.mosaic_sm90.words import Thread, Word, assemble, at, load_float, load_words

TABLE_SCALE = 1.437005
"""The factor between 1 and 2 with which NF4's values are rounded to bfloat16 with the smallest error."""


def add(plan: Plan, sums, codes, scales, x, table):
    """The sums [64, 8 · pieces], a warp's as its registers hold them, with the products of a stage."""
    of_codes, of_x = transforms(plan)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.RefType(of_codes),
            plgpu.RefType(),
            plgpu.RefType(of_x),
            plgpu.RefType(),
        ),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add_stage(_, sums, *refs):
        element = ir.MemRefType(refs[2].type).element_type
        stage = _Stage(plan, [mgpu.utils.memref_ptr(ref) for ref in refs], element)
        pairs = sums.registers.reshape(-1)
        found = stage.add([vector.extract(pair, [], [index]) for pair in pairs for index in range(2)])
        two = ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty(len(pairs), object)
        for index in range(len(pairs)):
            registers[index] = vector.from_elements(two, found[2 * index : 2 * index + 2])
        return mgpu.FragmentedArray(
            _registers=registers.reshape(sums.registers.shape), _layout=sums.layout, _is_signed=None
        )

    return add_stage(sums, codes, scales, x, table)  # pyright: ignore[reportCallIssue]


class _Stage:
    """A stage in shared memory, as one thread reads it."""

    def __init__(self, plan: Plan, pointers: Sequence[ir.Value], element: ir.Type):
        self.plan, self.element, self.me = plan, element, Thread(plan.config.column_warps)
        self.codes, self.scales, self.x, table = pointers
        self.table = Word(llvm.ptrtoint(ir.IntegerType.get_signless(32), table))  # pyright: ignore[reportArgumentType]

    def add(self, sums: list[ir.Value]) -> list[ir.Value]:
        """The sums with the products of the warp's blocks."""
        plan, config, me = self.plan, self.plan.config, self.me
        for block in range(config.blocks):
            number = me.column_warp * config.blocks + block
            segment, inner = number >> 2, number & 3
            x = [self.x_words(number, tile) for tile in range(plan.token_tiles)]
            for tile in range(config.tiles):
                first = segment * plan.rows + (me.row_warp * config.tiles + tile) * 16 + me.row_of_W
                scales, words = [], []
                for half in range(2):
                    row = first + 8 * half
                    piece = (inner * 2 + (me.place >> 1)) ^ me.row_of_W  # swizzled by the row among eight
                    words.append(load_words(self.codes, row * SEGMENT + piece * 16 + (me.place & 1) * 8, 2))
                    scales.append(load_float(self.scales, row * 16 + inner * 4))
                for token_tile, product in enumerate(self.products(words, x)):
                    here = 4 * (tile * plan.token_tiles + token_tile)
                    for index in range(4):
                        sums[here + index] = _fma(product[index], scales[index // 2], sums[here + index])
        return sums

    def x_words(self, block: Word, tile: int) -> list[tuple[ir.Value, ir.Value]]:
        """A lane's operand registers of 64 columns and eight tokens, two for each 16 columns."""
        plan, token = self.plan, self.me.token + tile * TOKENS
        if (tile + 1) * TOKENS > plan.tokens:
            token = token.least(plan.tokens - 1)  # sums of tokens that are not there are dropped
        place, swizzle = (block * plan.tokens + token) * 128, token & 7
        low, high = (load_words(self.x, place + ((self.me.place + 4 * half) ^ swizzle) * 16, 4) for half in range(2))
        return [(_permute(*pair, 0x5410), _permute(*pair, 0x7632)) for pair in zip(low, high, strict=True)]

    def products(self, words, x) -> list[list[ir.Value]]:
        """Products of 16 rows and 64 columns, without scales, with each eight tokens."""
        zero = mgpu.utils.c(0.0, ir.F32Type.get())
        sums = [[zero] * 4 for _ in x]
        for step in range(4):
            weights = [
                self.look_up(words[half][step // 2], 2 * (step % 2) + byte) for byte in range(2) for half in range(2)
            ]
            sums = [_multiply(sums[tile], weights, x[tile][step], self.element) for tile in range(len(x))]
        return sums

    def look_up(self, word: ir.Value, byte: int) -> ir.Value:
        """The two values of one byte of codes."""
        i32 = ir.IntegerType.get_signless(32)
        text = f"prmt.b32 $0, $1, $2, 0x55{byte}4;"
        place = Word(assemble(text, [word, (self.me.lane * 4).value], "=r,r,r", i32))
        return assemble("ld.shared.b32 $0, [$1];", [(place + self.table).value], "=r,r", i32)


def finish(plan: Plan, sums, sums_smem, out_ref, *item):
    """Add up what the warps of the same rows have, each of them some of it, and write it to the item's rows."""
    warps, pieces = plan.config.column_warps, plan.pieces

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, *(plgpu.RefType(),) * (2 + len(item))))
    def finish_tile(_, sums, sums_smem, out_ref, *item):
        pointer, out, *item = map(mgpu.utils.memref_ptr, (sums_smem, out_ref, *item))
        four, me = ir.VectorType.get((4,), ir.F32Type.get()), Thread(plan.config.column_warps, again=True)
        numbers = [vector.extract(pair, [], [index]) for pair in sums.registers.reshape(-1) for index in range(2)]

        together = -(-pieces // plan.config.rounds)

        def place(piece: int, slot: Word | int) -> Word:
            number = me.row_warp * together + piece % together
            return ((number * (warps - 1) + Word.of(slot)) * 32 + me.lane) * 16

        for first in range(0, pieces, together):
            those = range(first, min(first + together, pieces))
            if first and warps > 1:
                gpu.barrier()
            for piece in those if warps > 1 else ():
                slot = (me.column_warp + (warps - piece % warps - 1)) % warps
                with mgpu.utils.when(slot.below(warps - 1)):  # the last would be the warp's own
                    own = vector.from_elements(four, numbers[4 * piece : 4 * piece + 4])
                    llvm.store(own, at(pointer, place(piece, slot)), alignment=16)
            if warps > 1:
                gpu.barrier()  # what is written again after the next tile, after more barriers
            for piece in those:
                with mgpu.utils.when(me.column_warp.equals(piece % warps)):
                    total = numbers[4 * piece : 4 * piece + 4]
                    for slot in range(warps - 1):
                        others = llvm.load(four, at(pointer, place(piece, slot)), alignment=16)
                        total = [arith.addf(total[index], vector.extract(others, [], [index])) for index in range(4)]
                    _write(plan, me, piece, total, out, ir.MemRefType(out_ref.type).element_type, item)

    finish_tile(sums, sums_smem, out_ref, *item)  # pyright: ignore[reportCallIssue]


def _write(plan: Plan, me: Thread, piece: int, total: Sequence[ir.Value], out: ir.Value, element: ir.Type, item):
    """Write the sums of 16 rows and eight tokens."""
    tile, token_tile = divmod(piece, plan.token_tiles)
    row = (me.row_warp * plan.config.tiles + tile) * 16 + me.row_of_W
    for index in range(4):
        token = me.place + (4 * (index % 2) + token_tile * TOKENS)  # `Thread.token` of columns 2 · place and the next
        with mgpu.utils.when(token.below(plan.tokens)):
            value = arith.mulf(total[index], mgpu.utils.c(1 / TABLE_SCALE, ir.F32Type.get()))
            if plan.config.splits == 1:
                value = arith.truncf(element, value)
            size = 2 if plan.config.splits == 1 else 4
            number = row_of(item, token)
            there = mgpu.utils.when(number.below(2**31 - 1)) if item else contextlib.nullcontext()
            with there:
                llvm.store(value, at(out, (number * plan.out + row + 8 * (index // 2)) * size), alignment=size)


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
