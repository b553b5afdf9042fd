"""32-bit integers, pointers and assembly of a thread, for kernels that are written below Pallas."""

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
    __xor__ = functools.partialmethod(_by, arith.xori)
    __lshift__ = functools.partialmethod(_by, arith.shli)
    __rshift__ = functools.partialmethod(_by, arith.shrui)
    least = functools.partialmethod(_by, arith.minui)
    """The smaller of the two."""

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
