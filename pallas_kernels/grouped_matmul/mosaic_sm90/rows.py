"""Rows at any place: gathered loads, and stores of the first rows of a tile.

Hopper's copy engine (TMA) moves boxes of fixed size: it neither gathers rows nor stops at a row that is known at run
time alone. Both are written out here for the 128 threads of a warpgroup and tiles of 64×64 elements of 16 bits,
swizzled by 128 bytes: piece p (16 bytes) of row r lies at p xor (r mod 8). Thread t has piece t mod 8 of rows t div 8
and 16, 32 and 48 below, where it lies at the same place.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_SPLAT = plgpu.Layout.WG_SPLAT
_REF = plgpu.RefType()
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILE = plgpu.RefType(SWIZZLED)
_BEGIN = """{
.reg .b32 t, r, p, s, i, n, m, w0, w1, w2, w3; .reg .b64 a, o; .reg .pred q;
and.b32 t, $0, 127; shr.u32 r, t, 3; and.b32 p, t, 7;
and.b32 s, r, 7; xor.b32 s, s, p; shl.b32 s, s, 4; mad.lo.s32 s, r, 128, s;
"""


def gather(x, rows, tile, first, last, term) -> None:
    """Start copying 64 columns of chosen rows into a tile.

    Args:
        x: [T, K] in global memory, K a multiple of 8; columns past K become zeros.
        rows: int32 [M] in global memory; None: row i of x is row i.
        tile: [64, 64] in shared memory.
        first: the tile's first row: row i of the tile is x[rows[first + i]].
        last: the last row; those behind it become zeros.
        term: first column.
    """
    columns, chosen = x.shape[1], rows is not None
    index = "mul.wide.s32 a, i, 4; add.s64 a, a, $2; ld.global.nc.b32 i, [a];" if chosen else ""

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, _TILE, _SPLAT, _SPLAT, _SPLAT))
    def copy(_, x, rows, tile, first, last, term):
        asm = (
            _BEGIN
            + f"""
        shl.b32 p, p, 3; add.s32 p, p, $6; setp.lt.s32 q, p, {columns}; selp.b32 n, 16, 0, q; selp.b32 p, p, 0, q;
        mul.wide.s32 o, p, 2; add.s64 o, o, $1; add.s32 s, s, $3; add.s32 r, r, $4;"""
        )
        for row in range(0, 64, 16):
            asm += f"""
            add.s32 i, r, {row}; setp.le.s32 q, i, $5; selp.b32 m, n, 0, q; min.s32 i, i, $5; {index}
            mul.wide.s32 a, i, {2 * columns}; add.s64 a, a, o;
            cp.async.cg.shared.global [s + {row * 128}], [a], 16, m;"""
        _run(asm + "}", x, rows, tile, first, last, term)

    copy(x, rows if chosen else x, tile, first, last, term)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def gather_commit() -> None:
    """Close the set of copies started since the last call."""
    _plain("cp.async.commit_group;")


def gather_wait(pending: int) -> None:
    """Wait until at most `pending` of this thread's closed sets of copies are under way."""
    _plain(f"cp.async.wait_group {pending};")


def store(tile, out, first, count, column) -> None:
    """Write the first rows of a tile.

    Args:
        tile: [64, 64] in shared memory.
        out: [M, N] in global memory, N a multiple of 8; columns past N are left out.
        first: row of the tile's first row.
        count: rows to write.
        column: of the tile's first column.
    """
    columns = out.shape[1]

    @plgpu.inline_mgpu(arg_types=(_REF, _TILE, _SPLAT, _SPLAT, _SPLAT))
    def write(_, out, tile, first, count, column):
        asm = (
            _BEGIN
            + f"""
        add.s32 s, s, $2; shl.b32 p, p, 3; add.s32 p, p, $5; setp.lt.s32 q, p, {columns}; selp.b32 n, $4, 0, q;
        mul.wide.s32 o, p, 2; add.s64 o, o, $1; add.s32 i, r, $3; mul.wide.s32 a, i, {2 * columns}; add.s64 o, o, a;"""
        )
        for row in range(0, 64, 16):
            asm += f"""
            add.s32 i, r, {row}; setp.lt.s32 q, i, n;
            @q ld.shared.v4.b32 {{w0, w1, w2, w3}}, [s + {row * 128}];
            @q st.global.v4.b32 [o + {row * 2 * columns}], {{w0, w1, w2, w3}};"""
        _run(asm + "}", out, tile, first, count, column)

    write(out, tile, first, count, column)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _run(asm: str, *arguments) -> None:
    """Run assembly of the thread's number ($0), then of addresses and numbers."""
    operands = [mgpu.utils.thread_idx(), *(_operand(argument) for argument in arguments)]
    constraints = ",".join("l" if str(operand.type) == "i64" else "r" for operand in operands)
    llvm.inline_asm(_void(), operands, asm, f"{constraints},~{{memory}}", has_side_effects=True)


def _operand(argument):
    """A number, or an address: of 32 bits in shared memory."""
    if isinstance(argument, mgpu.FragmentedArray):
        return argument.registers.item()
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
