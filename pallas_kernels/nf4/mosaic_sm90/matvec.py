"""y = x Wᵀ for a few rows of x, as few as one: bound by the packed bytes.

A warpgroup takes 32 rows of W and 512 columns at a time, two warps beside each other along either; the
warpgroups of a thread block share the columns and add up their sums. Nothing of W passes through shared memory:
the thread that loads a block's 32 bytes (lane t of four takes block t of 256 columns) decodes all of it with one table
and gives it to the tensor cores from its registers. Their product sums over 16 columns in an order that is free as long
as both operands agree, so each step takes four elements of each lane's own block; the thread's elements of x for the
same step are then contiguous too. x comes through shared memory by TMA, with zeros behind its last row.

Bounds on an H200, for 4096×14336: 33 MB at 4.2 TB/s take 7.9 µs; decoding takes 3.25 integer instructions a
code, 6.6 µs at full and 13 µs at half issue rate of 132 multiprocessors; both overlap.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import Array, Float, UInt8

from pallas_kernels import compat
from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.config import MATVEC_COLUMNS, MatvecConfig
from pallas_kernels.nf4.mosaic_sm90.lookup import lane_and_warp, look_up_word, words_of

COLUMNS = MATVEC_COLUMNS
"""Columns of W that a warpgroup takes at a time."""
ROWS = 32
"""Rows of W that its four warps cover once."""
_BLOCKS = COLUMNS // BLOCK
_STAGES = 2
"""Pieces of x in shared memory, for each warpgroup."""
_TOKENS = 8
"""Rows of x in one product of the tensor cores."""

# Codes [ROWS, COLUMNS / 2]: 2 × 2 warps; a lane holds all bytes of one block in each of two rows that are 8 apart.
_CODES = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, COLUMNS // 2), (ROWS // 2, COLUMNS // 4), (8, BLOCK_BYTES), (16,))),
    warp_dims=(-7, -6),
    lane_dims=(-3, -4),
    vector_dim=-1,
)
# Scales [ROWS, COLUMNS / 64] of the same blocks.
_ABSMAX = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, _BLOCKS), (ROWS // 2, _BLOCKS // 2), (8, 1))),
    warp_dims=(-6, -5),
    lane_dims=(-2, -3),
    vector_dim=-1,
)


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("config", "through", "interpret"))
def matvec(
    x: Float[Array, "rows in"],
    codes: UInt8[Array, "out half_in"],
    absmax: Float[Array, "out blocks"],
    *,
    config: MatvecConfig,
    through: str | None = None,
    interpret: Any = None,
) -> Float[Array, "rows out"]:
    """The product with a packed matrix, summed in float32.

    Args:
        x: bfloat16 or float16; `in` a multiple of COLUMNS.
        codes: uint8, split order; `out` at least ROWS.
        absmax: float32.
        config: block sizes.
        through: dtype that decoded values are rounded to before x's; None for none.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    (tokens, columns), out = x.shape, codes.shape[0]
    padded = pl.cdiv(tokens, _TOKENS) * _TOKENS
    groups = config.warpgroups
    kernel = plgpu.kernel(
        functools.partial(_kernel, config=config, through=through, interpreted=interpret is not None),
        out_type=jax.ShapeDtypeStruct((tokens, out), x.dtype),
        grid=(pl.cdiv(out, ROWS),),
        grid_names=("tile",),
        num_threads=groups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM(
                (groups * _STAGES, padded, _BLOCKS, BLOCK),
                x.dtype,
                transforms=(plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.SMEM((groups, 2 * ROWS, padded), jnp.float32),  # two warps lie beside each other along the columns
            plgpu.Barrier(num_barriers=groups * _STAGES),
            plgpu.Barrier(num_arrivals=groups),
        ),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # they are below, where something is written again
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="nf4_matvec",
        interpret=interpret,
    )
    return kernel(x.reshape(tokens, columns // BLOCK, BLOCK), codes, absmax)


def _kernel(
    x_ref, codes_ref, absmax_ref, out_ref, x_smem, sums, full, done, *, config: MatvecConfig, through, interpreted
):
    group, groups = lax.axis_index("warpgroup"), config.warpgroups
    steps, padded = x_ref.shape[1] // _BLOCKS, x_smem.shape[1]
    # The last tile is moved back to end with the array: it repeats what its neighbour writes.
    first = lax.min(lax.axis_index("tile") * ROWS, jnp.int32(out_ref.shape[1] - ROWS))
    rows = pl.ds(first, ROWS)
    turns = lax.div(steps - group + (groups - 1), jnp.int32(groups))

    def load_x(turn):
        slot = group * _STAGES + lax.rem(turn, jnp.int32(_STAGES))
        # From a row that is not known to be 0, because a copy may reach behind the last row.
        tokens, blocks = pl.ds(first * 0, padded), pl.ds((turn * groups + group) * _BLOCKS, _BLOCKS)
        plgpu.copy_gmem_to_smem(x_ref.at[tokens, blocks], x_smem.at[slot], full.at[slot])

    def load_codes(turn):
        step = lax.min(turn * groups + group, jnp.int32(steps - 1))
        codes = codes_ref.at[rows, pl.ds(step * (COLUMNS // 2), COLUMNS // 2)]
        absmax = absmax_ref.at[rows, pl.ds(step * _BLOCKS, _BLOCKS)]
        if interpreted:
            return codes[...], absmax[...]
        return compat.mosaic_load(codes, _CODES), compat.mosaic_load(absmax, _ABSMAX)

    def step(turn, carry):
        total, (codes, absmax), *ahead = carry
        ahead.append(load_codes(turn + config.ahead))
        slot = group * _STAGES + lax.rem(turn, jnp.int32(_STAGES))
        plgpu.barrier_wait(full.at[slot])
        add = _add_interpreted if interpreted else _add
        total = add(total, codes, absmax, x_smem.at[slot], through)
        # `add` ends in a barrier of the warpgroup: all its threads have read the stage that is loaded anew here.
        pl.when(turn + _STAGES < turns)(lambda: load_x(turn + _STAGES))
        return total, *ahead

    # In flight from here on: `_STAGES` pieces of x (TMA, shared memory), `config.ahead` pieces of W (plain loads,
    # registers). Warpgroups share no stage, so none waits for another before the end.
    for turn in range(_STAGES):
        pl.when(turn < turns)(functools.partial(load_x, jnp.int32(turn)))
    ahead = [load_codes(jnp.int32(turn)) for turn in range(config.ahead)]
    total = jnp.zeros(sums.shape[1:], jnp.float32)
    if not interpreted:
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
    total, *_ = lax.fori_loop(0, turns, step, (total, *ahead))
    sums.at[group][...] = total
    # The one barrier of the whole thread block: every warpgroup's sums are in shared memory.
    plgpu.barrier_arrive(done)
    plgpu.barrier_wait(done)
    if interpreted:
        _finish_interpreted(sums, out_ref.at[:, rows])
    else:
        _finish(sums, out_ref.at[:, rows], groups)


def _add(total, codes, absmax, x_ref, through):
    """`total` [2 · rows, tokens] and the product of decoded codes and x; the halves of the columns warp by warp."""
    dtype = x_ref.dtype
    transforms = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, _CODES, _ABSMAX, plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add(_, total, codes, absmax, x_ref):
        token_tiles, offset = total.shape[1] // _TOKENS, _offset_in_x()
        sums = total.registers.reshape(token_tiles, 2).copy()  # 2: rows that are 8 apart
        packed, scales = codes.registers.reshape(2, 2), absmax.registers.reshape(2)
        pointer = mgpu.utils.memref_ptr(x_ref)
        for quarter in range(4):  # of a block's bytes: 8 of them, two words
            x_words = [
                [_load_x(pointer, offset, half * 4 + quarter, tile) for tile in range(token_tiles)] for half in range(2)
            ]
            decoded = []  # by row, word and half: two registers
            for row in range(2):
                scale = vector.extract(scales[row], [], [0])
                words = words_of(packed[row, quarter // 2])[quarter % 2 * 2 :][:2]
                decoded.append([look_up_word(word, scale, dtype, through) for word in words])
            for word in range(2):
                for half in range(2):
                    upper, lower = decoded[0][word][half], decoded[1][word][half]
                    weights = [upper[0], lower[0], upper[1], lower[1]]
                    for tile in range(token_tiles):
                        pair = x_words[half][tile][2 * word : 2 * word + 2]
                        sums[tile] = _multiply(sums[tile], weights, pair, dtype)
        mgpu.utils.warpgroup_barrier()  # every thread has read x: its stage may be loaded anew
        return mgpu.FragmentedArray(
            _registers=sums.reshape(total.registers.shape), _layout=total.layout, _is_signed=None
        )

    return add(total, codes, absmax, x_ref)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _add_interpreted(total, codes, absmax, x_ref, through):
    rows, dtype = codes.shape[0], x_ref.dtype
    blocks, scales = codes.reshape(rows * _BLOCKS, BLOCK_BYTES), absmax.reshape(rows * _BLOCKS, 1)
    halves = [ptx.lookup_in_jax(blocks, scales, dtype, half, through) for half in ptx.HALVES]
    weights = jnp.concatenate(halves, axis=1).reshape(rows, COLUMNS)
    x = x_ref[...].reshape(-1, COLUMNS)
    product = lax.dot_general(weights, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return total + jnp.pad(product, ((0, rows), (0, 0)))


def _offset_in_x() -> tuple[ir.Value, ir.Value]:
    """Bytes from the first row and block of x to this lane's, and the swizzle (exclusive or) behind that."""
    i32 = ir.IntegerType.get_signless(32)

    def c(value):
        return mgpu.utils.c(value, i32)

    lane, warp = lane_and_warp()
    block = arith.addi(arith.muli(arith.andi(warp, c(1)), c(4)), arith.andi(lane, c(3)))
    token = arith.shrui(lane, c(2))
    return arith.addi(arith.muli(token, c(_BLOCKS * 128)), arith.muli(block, c(128))), arith.muli(block, c(16))


def _load_x(pointer: ir.Value, offset: tuple[ir.Value, ir.Value], piece: int, tile: int) -> list[ir.Value]:
    """Eight elements of the lane's block of x as four registers: the `piece`th, for the `tile`th eight rows."""
    i32 = ir.IntegerType.get_signless(32)
    base, swizzle = offset
    place = arith.addi(base, arith.xori(swizzle, mgpu.utils.c(piece * 16, i32)))
    place = arith.addi(place, mgpu.utils.c(tile * _TOKENS * _BLOCKS * 128, i32))
    address = mgpu.utils.getelementptr(pointer, [place], ir.IntegerType.get_signless(8))
    loaded = llvm.load(ir.VectorType.get((4,), i32), address, alignment=16)
    return [vector.extract(loaded, [], [index]) for index in range(4)]


def _multiply(sums: list[ir.Value], weights: list[ir.Value], x: list[ir.Value], dtype) -> list[ir.Value]:
    """A warp's product of weights [16, 16] and x [16, 8], added to sums [16, 8]."""
    name = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]
    f32 = ir.F32Type.get()
    addends = [vector.extract(pair, [], [index]) for pair in sums for index in range(2)]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    results = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    struct = llvm.inline_asm(results, [*weights, *x, *addends], text, constraints, asm_dialect=0)
    numbers = [llvm.extractvalue(f32, struct, [index]) for index in range(4)]  # pyright: ignore[reportArgumentType]
    return [vector.from_elements(ir.VectorType.get((2,), f32), numbers[pair : pair + 2]) for pair in (0, 2)]


def _finish(sums, out_ref, groups: int):
    """Add up the sums of the warpgroups and of the halves of the columns, and write them transposed."""
    tokens, rows, dtype = *out_ref.shape, out_ref.dtype

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def finish(_, sums, out_ref):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()

        def c(value):
            return mgpu.utils.c(value, i32)

        def to_index(value):
            return arith.index_cast(index, value)

        threads = 128 * groups
        for start in range(0, rows * tokens, threads):
            number = arith.addi(mgpu.utils.thread_idx(), c(start))
            inside = arith.cmpi(arith.CmpIPredicate.ult, number, c(rows * tokens))
            with mgpu.utils.when(inside):
                row, token = arith.remui(number, c(rows)), arith.divui(number, c(rows))
                # Warps in order: the upper rows' two halves of the columns, then the lower rows'.
                place = arith.addi(arith.muli(arith.divui(row, c(16)), c(32)), arith.remui(row, c(16)))
                addends = [
                    memref.load(sums, [mgpu.utils.c(g, index), to_index(arith.addi(place, c(16 * h))), to_index(token)])
                    for g in range(groups)
                    for h in range(2)
                ]
                total = functools.reduce(arith.addf, addends)
                rounded = arith.truncf(mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)), total)
                memref.store(rounded, out_ref, [to_index(token), to_index(row)])

    finish(sums, out_ref)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _finish_interpreted(sums, out_ref):
    tokens, rows = out_ref.shape
    out_ref[...] = jnp.sum(sums[...], axis=0)[:rows, :tokens].T.astype(out_ref.dtype)
