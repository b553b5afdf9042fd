"""A thread's place, 32-bit integers, pointers and assembly, for kernels that are written below Pallas."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


@dataclasses.dataclass(frozen=True)
class Word:
    """A 32-bit integer register with Python's operators; the other operand is one too, or a constant.

    Attributes:
        value: i32.
    """

    value: ir.Value

    @classmethod
    def of(cls, number: "int | Word") -> "Word":
        """A constant as a register."""
        return number if isinstance(number, Word) else cls(mgpu.utils.c(number, ir.IntegerType.get_signless(32)))

    def _by(self, operation: Callable[..., Any], other: "int | Word") -> "Word":
        return Word(operation(self.value, Word.of(other).value))

    __add__ = functools.partialmethod(_by, arith.addi)
    __sub__ = functools.partialmethod(_by, arith.subi)
    __mul__ = functools.partialmethod(_by, arith.muli)
    __floordiv__ = functools.partialmethod(_by, arith.divui)
    __mod__ = functools.partialmethod(_by, arith.remui)
    __and__ = functools.partialmethod(_by, arith.andi)
    __or__ = functools.partialmethod(_by, arith.ori)
    __xor__ = functools.partialmethod(_by, arith.xori)
    __lshift__ = functools.partialmethod(_by, arith.shli)
    __rshift__ = functools.partialmethod(_by, arith.shrui)

    def least(self, other: "int | Word") -> "Word":
        """The smaller of the two, without sign."""
        return self._by(arith.minui, other)

    def below(self, other: "int | Word") -> ir.Value:
        """Whether it is smaller, without sign."""
        return arith.cmpi(arith.CmpIPredicate.ult, self.value, Word.of(other).value)

    def equals(self, other: "int | Word") -> ir.Value:
        """Whether both are one number."""
        return arith.cmpi(arith.CmpIPredicate.eq, self.value, Word.of(other).value)


def at(pointer: ir.Value, place: Word) -> ir.Value:
    """The pointer so many bytes behind another one."""
    return mgpu.utils.getelementptr(pointer, [place.value], ir.IntegerType.get_signless(8))


def load_words(pointer: ir.Value, place: Word, count: int) -> list[ir.Value]:
    """Words from an address that is a multiple of their size, in one load."""
    i32 = ir.IntegerType.get_signless(32)
    if count == 1:
        loaded = llvm.load(i32, at(pointer, place), alignment=4)
        return [loaded]  # pyright: ignore[reportReturnType]
    loaded = llvm.load(ir.VectorType.get((count,), i32), at(pointer, place), alignment=4 * count)
    return [vector.extract(loaded, [], [index]) for index in range(count)]


def load_float(pointer: ir.Value, place: Word) -> ir.Value:
    """A float32."""
    loaded = llvm.load(ir.F32Type.get(), at(pointer, place), alignment=4)
    assert isinstance(loaded, ir.Value)
    return loaded


def assemble(
    text: str, operands: Sequence[ir.Value], constraints: str, result: ir.Type | None = None, *, effects: bool = False
) -> Any:
    """The result of assembly, None without one.

    Args:
        text: PTX.
        operands: registers, by their constraints.
        constraints: LLVM's, results first.
        result: type of the result; None: none.
        effects: whether it reads or writes memory that others write, or waits.
    """
    if effects:
        constraints += ",~{memory}"
    kind = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(kind, operands, text, constraints, has_side_effects=effects, asm_dialect=0)


class Thread:
    """A thread's place.

    Attributes:
        lane: in its warp.
        warp: in its thread block.
        row: place among eight, along rows of W and of x.
        place: place among four, along columns; along rows of x in the sums.
        row_warp: the warp's place along the rows of W.
        column_warp: its place along the columns.
    """

    def __init__(self, column_warps: int, *, again: bool = False):
        """Find it out.

        Args:
            column_warps: warps side by side along the columns; the others lie along the rows of W.
            again: in registers of their own, or all places that follow would be computed, and kept, before the loops.
        """
        number = mgpu.utils.thread_idx()
        if again:
            number = assemble("mov.b32 $0, $1;", [number], "=r,r", number.type, effects=True)
        self.lane, self.warp = Word(number) & 31, Word(number) >> 5
        self.row, self.place = self.lane >> 2, self.lane & 3
        self.row_warp, self.column_warp = self.warp // column_warps, self.warp % column_warps

    @property
    def row_of_W(self) -> Word:
        """The row of eight in an operand's place: four neighbours in it have different banks, swizzled as they are."""
        return ((self.row & 3) << 1) | (self.row >> 2)

    @property
    def token(self) -> Word:
        """The row of x among eight in an operand's place, ordered so that four neighbours have different banks."""
        return (self.row >> 1) | ((self.row & 1) << 2)
