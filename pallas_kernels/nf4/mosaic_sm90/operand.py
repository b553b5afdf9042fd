"""64 × 64 decoded weights as the register operand of wgmma.

A thread's elements of an operand of 64 columns are the pair 2q, 2q + 1 (q: its lane of four) in each eight of two rows.
Its pairs of eight and the next eight are what two 32-bit words of codes hold beside those of the neighbouring lane; a
byte permutation joins them to one word. Four lanes share a block: each makes a fourth of the table of its products.

The transposed operand would take elements of sixteen blocks in each thread. So the warps decode as for the other one
and exchange the results through shared memory, 8 × 8 matrices at a time, which are transposed as they are read.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import compat
from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.mosaic_sm90.lookup import joined, look_up_in_planes, shared_planes, values_of_lane

ROWS = 64
"""Rows of W that are decoded at a time, and columns."""
CODES_TRANSFORMS = (plgpu.TilingTransform((8, 2 * BLOCK_BYTES)), plgpu.SwizzleTransform(64))
"""Transforms of codes [ROWS, 64] in shared memory: two blocks of each row."""
_SCALES = plgpu.Layout.WGMMA.reduce(1)
_RESULT = mgpu.WGMMA_LAYOUT
_PACKED = plgpu.ShapeDtypeStruct((ROWS, 40), jnp.int32, layout=plgpu.Layout.WGMMA)
"""Ten words of each of a thread's two rows; the shape is that of no matrix."""


def load(codes, absmax, dtype, through: str | None, block, *, interpreted: bool):
    """The operands of `decode`, from shared memory: codes and, for 16 bits, the tables to look them up in.

    Args:
        codes: reference to codes [64, 64] in shared memory, with CODES_TRANSFORMS.
        absmax: reference to scales [64] in shared memory.
        dtype: of the decoded weights.
        through: dtype that they are rounded to before; None for none.
        block: which of the two blocks, 0 or 1: a number, or that of the warpgroup.
        interpreted: whether this runs in the interpreter, which knows no assembly.
    """
    if interpreted:
        words = codes[...]
        return jnp.where(block == 0, words[:, :BLOCK_BYTES], words[:, BLOCK_BYTES:]), absmax[...]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(CODES_TRANSFORMS), _SCALES), return_type=_PACKED)
    def load(_, codes, absmax):
        warpgroup = arith.shrui(mgpu.utils.thread_idx(), _constant(7))
        return _load(codes, absmax, dtype, through, _constant(block) if isinstance(block, int) else warpgroup)

    return load(codes, compat.mosaic_load(absmax, _SCALES))  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def decode(packed, dtype, through: str | None, *, interpreted: bool):
    """Rows of W as operand [64 rows, 64 columns].

    Args:
        packed: by `load`.
        dtype: of the result.
        through: as in `load`, whose tables have it; the interpreter rounds here.
        interpreted: as in `load`.
    """
    if interpreted:
        return _decode_in_jax(packed, dtype, through)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=_operand(dtype))
    def look_up(_, packed):
        return _array(_look_up(packed, dtype))

    return look_up(packed)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def decode_transposed(packed, exchange, through: str | None, *, interpreted: bool):
    """Columns of W as operand [64 columns, 64 rows].

    Args:
        packed: by `load`.
        exchange: reference to shared memory [64, 64] in the dtype of the result; the warpgroup's own, and another one
            than last time.
        through: as in `decode`.
        interpreted: as in `load`.
    """
    dtype = exchange.dtype
    if interpreted:
        return _decode_in_jax(packed, dtype, through).T

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=_operand(dtype))
    def look_up(_, packed, exchange):
        return _array(_transposed(_look_up(packed, dtype), mgpu.utils.memref_ptr(exchange), dtype))

    return look_up(packed, exchange)  # pyright: ignore[reportCallIssue]


def _decode_in_jax(packed, dtype, through: str | None):
    codes, absmax = packed
    halves = [ptx.lookup_in_jax(codes, absmax[:, None], dtype, half, through) for half in ptx.HALVES]
    return jnp.concatenate(halves, axis=1)


def _operand(dtype):
    return plgpu.ShapeDtypeStruct((ROWS, BLOCK), dtype, layout=plgpu.Layout.WGMMA)


def _array(registers: np.ndarray):
    """Registers by column in eights and by row (two that are 8 apart)."""
    registers = registers.reshape(_RESULT.registers_shape((ROWS, BLOCK)))
    return mgpu.FragmentedArray(_registers=registers, _layout=_RESULT, _is_signed=None)


def _load(codes, absmax, dtype, through: str | None, block: ir.Value):
    """_PACKED: of each of a thread's two rows, two words of codes and the eight of the table."""
    scales = [vector.extract(register, [], [0]) for register in absmax.registers.reshape(2)]
    pointer, select = mgpu.utils.memref_ptr(codes), _pair_of_lane()
    values = values_of_lane(_lane()[2])
    registers = np.empty((_PACKED.shape[1] // 8, 2), object)
    pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
    for row, scale in enumerate(scales):
        places = [arith.addi(arith.muli(block, _constant(2)), _constant(piece)) for piece in range(2)]  # of 16 bytes
        words = [_load_word(pointer, select, row, place) for place in places]
        words += shared_planes(scale, values, dtype, through)
        for index in range(len(registers)):
            registers[index, row] = vector.from_elements(pair, words[2 * index : 2 * index + 2])
    registers = registers.reshape(_RESULT.registers_shape(_PACKED.shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=_RESULT, _is_signed=True)


def _look_up(packed, dtype) -> np.ndarray:
    """The registers of the operand [64 rows, 64 columns]."""
    registers = packed.registers.reshape(_PACKED.shape[1] // 8, 2)
    decoded = np.empty((BLOCK // 8, 2), object)
    for row in range(2):
        words = [vector.extract(pair, [], [index]) for pair in registers[:, row] for index in range(2)]
        for piece in range(2):
            for nibble, registers_of_nibble in enumerate(look_up_in_planes(words[piece], words[2:])):
                for index, register in enumerate(registers_of_nibble):
                    decoded[4 * nibble + 2 * piece + index, row] = joined([register], dtype)
    return decoded


def _constant(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _lane() -> tuple[ir.Value, ir.Value, ir.Value]:
    """The thread's warp in its warpgroup, its row of eight and its lane of four."""
    thread = mgpu.utils.thread_idx()
    warp = arith.andi(arith.shrui(thread, _constant(5)), _constant(3))
    return warp, arith.andi(arith.shrui(thread, _constant(2)), _constant(7)), arith.andi(thread, _constant(3))


def _pair_of_lane() -> ir.Value:
    """Which bytes of two words are this lane's: the lower or the upper two of each."""
    _, _, quarter = _lane()
    odd = arith.andi(quarter, _constant(1))
    return arith.addi(_constant(0x5410), arith.muli(odd, _constant(0x2222)))


def _at(pointer: ir.Value, place: ir.Value) -> ir.Value:
    return mgpu.utils.getelementptr(pointer, [place], ir.IntegerType.get_signless(8))


def _load_word(pointer: ir.Value, select: ir.Value, row: int, piece: ir.Value) -> ir.Value:
    """The lane's codes in 16 bytes: two of the first eight, two of the other eight.

    Args:
        pointer: codes [64, 64] in shared memory, 64-byte swizzle: 16-byte pieces of rows 2i and 2i + 1 change places
            (exclusive or) by i.
        select: by `_pair_of_lane`.
        row: 0, or 1 for the row 8 below.
        piece: of the row, 0 to 3.
    """
    i32 = ir.IntegerType.get_signless(32)
    warp, eighth, quarter = _lane()
    place = arith.addi(arith.muli(warp, _constant(16 * 64)), arith.muli(eighth, _constant(64)))
    place = arith.addi(place, arith.muli(arith.shrui(quarter, _constant(1)), _constant(4)))
    swizzled = arith.xori(arith.shrui(eighth, _constant(1)), piece)
    place = arith.addi(place, arith.muli(swizzled, _constant(16)))
    words = []
    for offset in (0, 8):
        where = arith.addi(place, _constant(row * 8 * 64 + offset))
        words.append(llvm.load(i32, _at(pointer, where), alignment=4))
    word = llvm.inline_asm(i32, [*words, select], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", asm_dialect=0)
    assert isinstance(word, ir.Value)
    return word


def _transposed(decoded: np.ndarray, pointer: ir.Value, dtype) -> np.ndarray:
    """The registers of the transposed operand, from those of the operand.

    Args:
        decoded: registers by `_look_up`.
        pointer: [64, 64] elements of 2 bytes in shared memory. 16-byte pieces of row i change places by i modulo 8, so
            that eight rows of a matrix, here and there, lie in different banks.
        dtype: of the elements.
    """
    i32 = ir.IntegerType.get_signless(32)
    lane = arith.andi(mgpu.utils.thread_idx(), _constant(31))
    warp, _, _ = _lane()
    # A lane has the address of a row of one of four matrices: two rows of them, two columns.
    row, matrix = arith.andi(lane, _constant(7)), arith.shrui(lane, _constant(3))
    first, second = arith.andi(matrix, _constant(1)), arith.shrui(matrix, _constant(1))

    def address(eight_rows: ir.Value, eight_columns: ir.Value) -> ir.Value:
        start = arith.addi(arith.muli(eight_rows, _constant(8 * 128)), arith.muli(row, _constant(128)))
        return _at(pointer, arith.addi(start, arith.muli(arith.xori(eight_columns, row), _constant(16))))

    twice = arith.muli(warp, _constant(2))
    for pair in range(0, BLOCK // 8, 2):
        place = address(arith.addi(twice, first), arith.addi(second, _constant(pair)))
        words = [_word(decoded[pair + column, eight]) for column in range(2) for eight in range(2)]
        text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [place, *words], text, "l,r,r,r,r,~{memory}", has_side_effects=True, asm_dialect=0)
    mgpu.utils.warpgroup_barrier()
    transposed = np.empty_like(decoded)
    for pair in range(0, BLOCK // 8, 2):
        place = address(arith.addi(second, _constant(pair)), arith.addi(twice, first))
        text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
        results = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        loaded = llvm.inline_asm(
            results, [place], text, "=r,=r,=r,=r,l,~{memory}", has_side_effects=True, asm_dialect=0
        )
        for index in range(4):
            register = llvm.extractvalue(i32, loaded, [index])  # pyright: ignore[reportArgumentType]
            transposed[pair + index // 2, index % 2] = joined([register], dtype)
    return transposed


def _word(pair: ir.Value) -> ir.Value:
    """A vector of two elements as a word."""
    words = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), pair)
    return vector.extract(words, [], [0])
