"""The NF4 lookup in PTX, shared by the Triton and the Mosaic kernel.

`prmt` picks four bytes out of eight by four 4-bit selectors: a lookup of four codes at once in a table of eight bytes.
A table of sixteen 16-bit values is two planes of sixteen bytes (low bytes, high bytes), so one plane of four codes
takes three `prmt`: by the low three bits from entries 0–7, the same from entries 8–15, and a choice between the two by
the top bit. A last `prmt` a pair of elements joins the planes.

What makes 16-bit results cheap *and* exact: the table is scaled first. The sixteen products NF4[i] · absmax are taken
in float32 and rounded once, as bitsandbytes does element by element, and serve all codes that a thread holds of the
block. An element then costs 2.6 integer instructions, no multiplication and no conversion. float32 results need four
planes; there the values are looked up unscaled and multiplied after (6.5 integer instructions and a product).

The text is pure: ptxas merges the common parts of several words of one block, so the table is built once a thread.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.nf4.codebook import NF4_VALUES
from pallas_kernels.rounding import round_through

HALVES = ("low", "high")
#: dtype of the result: (its 32-bit registers for four elements, their LLVM constraint).
RESULTS = {"float8_e4m3fn": (1, "r"), "bfloat16": (2, "r"), "float16": (2, "r"), "float32": (4, "f")}
_CONVERT = {"bfloat16": "cvt.rn.bf16x2.f32", "float16": "cvt.rn.f16x2.f32"}
# Of the codes in w: the low three bits of each nibble, and the choices by the top bits; for two bytes each.
_SELECTORS = (
    "and.b32 s0, w, 0x77777777;",
    "shr.u32 s1, s0, 16;",
    "shr.u32 t0, w, 1;",
    "lop3.b32 t0, t0, 0x44444444, 0x32103210, 0xea;",
    "shr.u32 t1, t0, 16;",
)


@functools.cache
def lookup(dtype: str, halves: tuple[str, ...], through: str | None = None) -> str:
    """Assembly that decodes one 32-bit word of codes in the split order.

    Operands: the results, four elements of each wanted half in order, in RESULTS[dtype] registers each; the word; the
    block's absmax as a float register. Operands after these are not read.

    Args:
        dtype: "float8_e4m3fn", "bfloat16", "float16" or "float32".
        halves: which elements to produce: "low" (of the low nibbles), "high", or both in this order.
        through: dtype that products are rounded to before a narrower `dtype`; None for none.

    Returns:
        PTX in braces, for LLVM inline assembly.
    """
    count = RESULTS[dtype][0]
    word = len(halves) * count
    lines = [f"mov.f32 x, ${word + 1};"]
    if dtype == "float8_e4m3fn":
        return _select([*lines, *_scaled_plane(through)], word, 1, halves)
    lines += _float32_planes() if dtype == "float32" else _scaled_planes(_CONVERT[dtype], through)
    return _select(lines, word, 4 if dtype == "float32" else 2, halves)


@functools.cache
def lookup_in_planes() -> str:
    """Assembly that decodes one 32-bit word of codes in the split order to 16 bits, by a table in registers.

    Operands: the results, two registers of low and two of high elements; the word; the four registers of the table's
    low and the four of its high bytes (`shared_planes`).
    """
    lines = [f"mov.b32 q{plane}_{index}, ${5 + 4 * plane + index};" for plane in range(2) for index in range(4)]
    return _select(lines, 4, 2, HALVES)


@functools.cache
def shared_planes(dtype: str, through: str | None = None) -> str:
    """Assembly that makes the table of a block which four neighbouring lanes decode: each lane a fourth of it.

    Operands: the eight registers of the table, low bytes first; the block's absmax and four of the values of NF4, by
    the lane's place among the four, as float registers. All lanes of the warp must take part.

    Args:
        dtype: "bfloat16" or "float16".
        through: as in `lookup`.
    """
    lines = [f"mul.rn.f32 f{index}, $8, ${9 + index};" for index in range(4)]
    lines += [line for pair in range(2) for line in _rounded(f"f{2 * pair}", f"f{2 * pair + 1}", through)]
    lines += [f"{_CONVERT[dtype]} p{pair}, f{2 * pair + 1}, f{2 * pair};" for pair in range(2)]
    for plane, selector in enumerate(("0x6420", "0x7531")):
        lines += [f"prmt.b32 own, p0, p1, {selector};"]
        # Of the four lanes that differ in the lowest two bits.
        lines += [f"shfl.sync.idx.b32 ${4 * plane + lane}, own, {lane}, 0x1c03, 0xffffffff;" for lane in range(4)]
    return "{ .reg .f32 f<4>; .reg .b32 p<2>, own, a, b; .reg .b16 h0, h1; " + " ".join(lines) + " }"


def _select(lines: list[str], word: int, planes: int, halves: tuple[str, ...]) -> str:
    """The whole text: the planes, the lookups in them, and the names of all registers.

    Args:
        lines: that make q0_0, …, by the scale in x if at all.
        word: operand that holds the codes.
        planes: 1 of 8-bit results, 2 of 16-bit ones or 4 of float32.
        halves: which elements to produce.
    """
    lines = [f"mov.b32 w, ${word};", *lines, *_SELECTORS]
    for plane in range(planes):
        for part in range(2):  # bytes 0 and 1 of the word, then 2 and 3; nibbles low, high, low, high
            lines += _look_up([f"q{plane}_{index}" for index in range(4)], part, f"v{plane}_{part}")
    join, count = {1: (_join_8_bit, 1), 2: (_join_16_bit, 2), 4: (_join_float32, 4)}[planes]
    for index, half in enumerate(halves):
        lines += join(range(index * count, (index + 1) * count), HALVES.index(half))
    registers = [f"q{plane}_{index}" for plane in range(planes) for index in range(4)]
    registers += [f"v{plane}_{part}" for plane in range(planes) for part in range(2)]
    names = ", ".join(["w", "s0", "s1", "t0", "t1", "a", "b", *registers])
    return "{ .reg .b32 " + names + "; .reg .b32 p<8>; .reg .b16 h0, h1; .reg .f32 x, f0, f1; " + " ".join(lines) + " }"


@functools.cache
def table(index: int) -> str:
    """Assembly that makes a fourth of a block's table in float8_e4m3fn: four of the scaled values.

    Operands: the result; the absmax as a float register.

    Args:
        index: 0 to 3.
    """
    lines = ["mov.f32 x, $1;", *_scaled_fourth(index, None), f"mov.b32 $0, q0_{index};"]
    return f"{{ .reg .b32 q0_{index}, a, b; .reg .b16 h0, h1; .reg .f32 x, f0, f1; " + " ".join(lines) + " }"


@functools.cache
def lookup_in_table(half: str) -> str:
    """Assembly that decodes one half of a word of codes to float8_e4m3fn.

    Operands: the result, four elements in order; the word; the four parts of `table`.

    Args:
        half: "low" or "high".
    """
    return _select([f"mov.b32 q0_{index}, ${2 + index};" for index in range(4)], 1, 1, (half,))


@functools.cache
def column(byte: int) -> str:
    """Assembly that makes a column of four rows: one byte of each.

    Operands: the result; the four rows' words.

    Args:
        byte: of the words, 0 to 3.
    """
    picked = f"0x00{byte + 4:x}{byte:x}"
    lines = [f"prmt.b32 s0, $1, $2, {picked};", f"prmt.b32 s1, $3, $4, {picked};", "prmt.b32 $0, s0, s1, 0x5410;"]
    return "{ .reg .b32 s<2>; " + " ".join(lines) + " }"


@functools.cache
def columns() -> str:
    """Assembly that decodes a word of each of four rows to float8_e4m3fn and transposes: eight columns of four rows.

    Half the instructions of `lookup_in_table` and `column` beyond the lookups, where eight results can be had at once.

    Operands: the results, columns of the low nibbles in order, then of the high ones; the four rows' words; the rows'
    tables, four parts each.
    """
    lines = []
    for row in range(4):
        table = [f"${12 + 4 * row + index}" for index in range(4)]
        lines += [f"mov.b32 w, ${8 + row};", *_SELECTORS]
        lines += [line for part in range(2) for line in _look_up(table, part, f"v{row}_{part}")]
    for part in range(2):  # now rows of (low, high, low, high), to be transposed in two steps
        for pair in range(2):
            rows = f"v{2 * pair}_{part}, v{2 * pair + 1}_{part}"
            lines += [f"prmt.b32 p{2 * pair}, {rows}, 0x5140;", f"prmt.b32 p{2 * pair + 1}, {rows}, 0x7362;"]
        for byte in range(2):
            both = f"p{byte}, p{byte + 2}"
            lines += [f"prmt.b32 ${2 * part + byte}, {both}, 0x5410;"]
            lines += [f"prmt.b32 ${4 + 2 * part + byte}, {both}, 0x7632;"]
    looked_up = ", ".join(f"v{row}_{part}" for row in range(4) for part in range(2))
    return f"{{ .reg .b32 w, s0, s1, t0, t1, a, b, p<4>, {looked_up}; " + " ".join(lines) + " }"


def columns_in_jax(words: list[Array], absmax: list[Array]) -> list[Array]:
    """The results of `columns`, or of `column` after `lookup_in_table`, for interpreters without assembly."""
    columns = []
    for half in HALVES:
        for byte in range(4):
            column = jnp.zeros(words[0].shape, jnp.int32)
            for row, (word, scale) in enumerate(zip(words, absmax, strict=True)):
                codes = ((word >> (8 * byte)) & 255).astype(jnp.uint8)
                value = lookup_in_jax(codes, scale, jnp.float8_e4m3fn, half)
                column |= jax.lax.bitcast_convert_type(value, jnp.uint8).astype(jnp.int32) << (8 * row)
            columns.append(column)
    return columns


def lookup_in_jax(
    codes: UInt8[Array, "blocks bytes"],
    absmax: Float[Array, "blocks 1"],
    dtype: DTypeLike,
    half: str,
    through: str | None = None,
) -> Float[Array, "blocks bytes"]:
    """The results of `lookup`, for interpreters without assembly."""
    nibbles = codes & jnp.uint8(15) if half == "low" else codes >> jnp.uint8(4)
    values = jnp.zeros(codes.shape, jnp.float32)
    for code, value in enumerate(NF4_VALUES.tolist()):
        values = jnp.where(nibbles == code, value, values)
    return round_through(values * absmax, through).astype(dtype)


def _look_up(table: Sequence[str], part: int, result: str) -> list[str]:
    """Four codes of `_SELECTORS` in sixteen bytes, four registers."""
    return [
        f"prmt.b32 a, {table[0]}, {table[1]}, s{part};",
        f"prmt.b32 b, {table[2]}, {table[3]}, s{part};",
        f"prmt.b32 {result}, a, b, t{part};",
    ]


def _rounded(first: str, second: str, through: str | None) -> list[str]:
    """Two float32 registers, rounded to the values of a 16-bit dtype."""
    if through is None:
        return []
    lines = [f"{_CONVERT[through]} a, {second}, {first};"]
    if through == "bfloat16":
        return [
            *lines,
            "and.b32 b, a, 0xffff0000;",
            "shl.b32 a, a, 16;",
            f"mov.b32 {first}, a;",
            f"mov.b32 {second}, b;",
        ]
    return [*lines, "mov.b32 {h0, h1}, a;", f"cvt.f32.f16 {first}, h0;", f"cvt.f32.f16 {second}, h1;"]


def _products(pair: int, through: str | None) -> list[str]:
    """f0 and f1: two of the sixteen products with the scale."""
    first, second = (f"0f{bits:08X}" for bits in NF4_VALUES[2 * pair : 2 * pair + 2].view(np.uint32).tolist())
    return [f"mul.rn.f32 f0, x, {first};", f"mul.rn.f32 f1, x, {second};", *_rounded("f0", "f1", through)]


def _scaled_plane(through: str | None) -> list[str]:
    """q0_i: the sixteen products in 8 bits, four to a register."""
    return [line for index in range(4) for line in _scaled_fourth(index, through)]


def _scaled_fourth(index: int, through: str | None) -> list[str]:
    lines = []
    for half in range(2):
        lines += [*_products(2 * index + half, through), f"cvt.rn.satfinite.e4m3x2.f32 h{half}, f1, f0;"]
    return [*lines, f"mov.b32 q0_{index}, {{h0, h1}};"]


def _scaled_planes(convert: str, through: str | None) -> list[str]:
    """q0_i and q1_i: low and high bytes of the sixteen rounded products, four to a register."""
    lines = []
    for pair in range(8):
        lines += [*_products(pair, through), f"{convert} p{pair}, f1, f0;"]
    for index in range(4):
        first, second = f"p{2 * index}", f"p{2 * index + 1}"
        lines += [f"prmt.b32 q0_{index}, {first}, {second}, 0x6420;"]
        lines += [f"prmt.b32 q1_{index}, {first}, {second}, 0x7531;"]
    return lines


def _float32_planes() -> list[str]:
    """q0_i … q3_i: the four byte planes of the sixteen float32 values, four to a register."""
    planes = np.ascontiguousarray(NF4_VALUES.view(np.uint8).reshape(16, 4).T).view(np.uint32)
    return [f"mov.b32 q{plane}_{i}, 0x{planes[plane, i]:08x};" for plane in range(4) for i in range(4)]


def _join_8_bit(outputs: range, nibble: int) -> list[str]:
    return [
        f"prmt.b32 ${output}, v0_0, v0_1, 0x{nibble + 6:x}{nibble + 4:x}{nibble + 2:x}{nibble:x};" for output in outputs
    ]


def _join_16_bit(outputs: range, nibble: int) -> list[str]:
    selector = f"0x{nibble + 6:x}{nibble + 2:x}{nibble + 4:x}{nibble:x}"
    return [f"prmt.b32 ${output}, v0_{part}, v1_{part}, {selector};" for part, output in enumerate(outputs)]


def _join_float32(outputs: range, nibble: int) -> list[str]:
    lines = []
    for element, output in enumerate(outputs):
        part, byte = divmod(2 * element + nibble, 4)
        lines += [
            f"prmt.b32 a, v0_{part}, v1_{part}, 0x00{byte + 4:x}{byte:x};",
            f"prmt.b32 b, v2_{part}, v3_{part}, 0x00{byte + 4:x}{byte:x};",
            "prmt.b32 a, a, b, 0x5410;",
            "mov.b32 f0, a;",
            f"mul.rn.f32 ${output}, f0, x;",
        ]
    return lines
