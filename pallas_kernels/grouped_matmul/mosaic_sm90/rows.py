"""Rows at any place: gathered loads, and stores of the first rows of a tile.

Hopper's copy engine (TMA) moves boxes of fixed size: it neither gathers rows nor begins and ends at rows that are known
at run time alone. Both are written out here for the 128 threads of a warpgroup and tiles of 64×64 elements of 16 bits,
swizzled by 128 bytes: piece p (16 bytes) of row r lies at p xor (r mod 8). Thread t has piece t mod 8 of rows t div 8
and 16, 32 and 48 below, where it lies at the same place.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

_SPLAT = plgpu.Layout.WG_SPLAT
_REF = plgpu.RefType()
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILE = plgpu.RefType(SWIZZLED)
_CHOSEN = plgpu.Layout.WG_STRIDED((512,), vec_size=1)  # four numbers a thread
_BEGIN = """{
.reg .b32 t, r, p, s, i, n, w0, w1, w2, w3; .reg .b64 a, o; .reg .pred q, b;
and.b32 t, $0, 127; shr.u32 r, t, 3; and.b32 p, t, 7;
and.b32 s, r, 7; xor.b32 s, s, p; shl.b32 s, s, 4; mad.lo.s32 s, r, 128, s;
"""


def choose(rows, first, begin, end):
    """The rows that a thread gathers into a tile, as `gather` takes them.

    Args:
        rows: int32 [M] in global memory: row i of the tile is row rows[first + i]; None: row first + i.
        first: the tile's first row.
        begin: rows before it become zeros.
        end: so do rows from it on.
    """
    row = "mov.b32 ${0}, i;" if rows is None else "ld.global.nc.b32 ${0}, [a];"
    address = "" if rows is None else "mul.wide.s32 a, i, 4; add.s64 a, a, $8;"

    def load(_, first, begin, end, *rows):
        asm = "{ .reg .b32 i; .reg .b64 a; .reg .pred q, b; and.b32 i, $4, 127; shr.u32 i, i, 3; add.s32 i, i, $5;"
        for number in range(4):
            asm += f"""
            setp.ge.s32 b, i, $6; setp.lt.and.s32 q, i, $7, b; mov.b32 ${number}, -1; {address}
            @q {row.format(number)} add.s32 i, i, 16;"""
        i32 = ir.IntegerType.get_signless(32)
        numbers = _run(asm + "}", first, begin, end, *rows, results=(i32,) * 4)
        registers = np.array([vector.from_elements(ir.VectorType.get((1,), i32), [value]) for value in numbers])
        return mgpu.FragmentedArray(_registers=registers, _layout=_CHOSEN.to_mgpu(), _is_signed=True)

    given = () if rows is None else (rows,)
    types = (_SPLAT, _SPLAT, _SPLAT, *(_REF for _ in given))
    result = plgpu.ShapeDtypeStruct((512,), jnp.int32, layout=_CHOSEN)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(load)(first, begin, end, *given)


def gather(x, chosen, tile, term) -> None:
    """Start copying 64 columns of chosen rows into a tile.

    Args:
        x: [T, K] in global memory, K a multiple of 64.
        chosen: rows of x, from `choose`.
        tile: [64, 64] in shared memory.
        term: first column.
    """
    columns = x.shape[1]

    @plgpu.inline_mgpu(arg_types=(_REF, _CHOSEN, _TILE, _SPLAT))
    def copy(_, x, chosen, tile, term):
        asm = (
            _BEGIN
            + """
        shl.b32 p, p, 3; add.s32 p, p, $7; mul.wide.s32 o, p, 2; add.s64 o, o, $1; add.s32 s, s, $6;"""
        )
        for number, row in enumerate(range(0, 64, 16)):
            asm += f"""
            setp.ge.s32 q, ${2 + number}, 0; selp.b32 n, 16, 0, q; max.s32 i, ${2 + number}, 0;
            mul.wide.s32 a, i, {2 * columns}; add.s64 a, a, o;
            cp.async.cg.shared.global [s + {row * 128}], [a], 16, n;"""
        rows = [vector.extract(register, [], [0]) for register in chosen.registers.reshape(-1)]
        _run(asm + "}", x, *rows, tile, term)

    copy(x, chosen, tile, term)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def gather_commit() -> None:
    """Close the set of copies started since the last call."""
    _plain("cp.async.commit_group;")


def gather_wait(pending: int) -> None:
    """Wait until at most `pending` of this thread's closed sets of copies are under way."""
    _plain(f"cp.async.wait_group {pending};")


def store(tile, out, first, begin, end, column) -> None:
    """Write some rows of a tile.

    Args:
        tile: [64, 64] in shared memory.
        out: [M, N] in global memory, N a multiple of 64.
        first: the tile's first row.
        begin: rows before it are not written.
        end: nor are rows from it on.
        column: the tile's first column.
    """
    columns = out.shape[1]

    @plgpu.inline_mgpu(arg_types=(_REF, _TILE, _SPLAT, _SPLAT, _SPLAT, _SPLAT))
    def write(_, out, tile, first, begin, end, column):
        asm = (
            _BEGIN
            + f"""
        add.s32 s, s, $2; shl.b32 p, p, 3; add.s32 p, p, $6; mul.wide.s32 o, p, 2; add.s64 o, o, $1; add.s32 i, r, $3;
        mul.wide.s32 a, i, {2 * columns}; add.s64 o, o, a;"""
        )
        for row in range(0, 64, 16):
            asm += f"""
            setp.ge.s32 b, i, $4; setp.lt.and.s32 q, i, $5, b; add.s32 i, i, 16;
            @q ld.shared.v4.b32 {{w0, w1, w2, w3}}, [s + {row * 128}];
            @q st.global.v4.b32 [o + {row * 2 * columns}], {{w0, w1, w2, w3}};"""
        _run(asm + "}", out, tile, first, begin, end, column)

    write(out, tile, first, begin, end, column)  # pyright: ignore[reportCallIssue]  # the decorator takes it away


def _run(asm: str, *arguments, results=()):
    """Run assembly of its results ($0, …), the thread's number, then addresses and numbers."""
    operands = [mgpu.utils.thread_idx(), *(_operand(argument) for argument in arguments)]
    inputs = ["l" if str(operand.type) == "i64" else "r" for operand in operands]
    constraints = ",".join(["=&r"] * len(results) + inputs + ["~{memory}"])
    kind = llvm.StructType.get_literal(list(results)) if results else _void()
    struct: Any = llvm.inline_asm(kind, operands, asm, constraints, has_side_effects=True)
    return [llvm.extractvalue(result, struct, [number]) for number, result in enumerate(results)]


def _operand(argument):
    """A number, or an address: of 32 bits in shared memory."""
    if isinstance(argument, mgpu.FragmentedArray):
        return argument.registers.item()
    if not isinstance(argument.type, ir.MemRefType):
        return argument
    pointer = mgpu.utils.memref_ptr(argument)
    width = 32 if str(pointer.type).endswith("<3>") else 64
    return llvm.ptrtoint(ir.IntegerType.get_signless(width), pointer)


def _plain(asm: str) -> None:
    @plgpu.inline_mgpu()
    def run(_):
        llvm.inline_asm(_void(), [], asm, "~{memory}", has_side_effects=True)

    run()  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _void():
    return ir.Type.parse("!llvm.void")
