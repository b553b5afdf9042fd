"""NF4 dequantisation with Mosaic GPU, for Hopper; split order.

Two forms of one decode, chosen by the config:

- direct: each thread loads a few consecutive codes of a block from global memory and stores both halves as they come;
  no shared memory, many small thread blocks;
- pipelined: a persistent grid whose tiles go through shared memory by TMA, several in flight.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float, UInt8

from pallas_kernels import compat
from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.config import MosaicConfig


def dequantize(
    codes: UInt8[Array, "blocks 32"],
    absmax: Float[Array, " blocks"],
    *,
    dtype: DTypeLike,
    config: MosaicConfig,
    num_cores: int = 132,
    interpret=None,
) -> Float[Array, "blocks 64"]:
    """Decode whole blocks, at least `config.blocks` of them.

    Args:
        codes: uint8, split order.
        absmax: float32.
        dtype: bfloat16, float16 or float32.
        config: block sizes.
        num_cores: multiprocessors, for the pipelined form.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    blocks = absmax.size
    tiles = pl.cdiv(blocks, config.blocks)
    form, grid = (_pipelined, min(tiles, num_cores * config.blocks_per_core)) if config.stages else (_direct, tiles)
    body = functools.partial(form, config=config, blocks=blocks, grid=grid, interpreted=interpret is not None)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks, BLOCK), dtype),
        grid=(grid,),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(
            # Nothing is both read and written here; the pipeline brings its own barriers.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="nf4_dequantize",
        interpret=interpret,
    )
    return kernel(codes, absmax)


def _direct(codes_ref, absmax_ref, out_ref, *, config: MosaicConfig, blocks: int, grid: int, interpreted: bool):
    del grid
    # The last tile is moved back to end with the array: it repeats what its neighbour writes.
    start = lax.min(lax.axis_index("tile") * config.blocks, jnp.int32(blocks - config.blocks))
    rows = pl.ds(start, config.blocks)
    _decode_tile(codes_ref.at[rows], absmax_ref.at[rows], out_ref.at[rows], config=config, interpreted=interpreted)


def _pipelined(codes_ref, absmax_ref, out_ref, *, config: MosaicConfig, blocks: int, grid: int, interpreted: bool):
    first = lax.axis_index("tile")
    tiles = blocks // config.blocks

    def step(_, codes_smem, absmax_smem, out_smem):
        _decode_tile(codes_smem, absmax_smem, out_smem, config=config, interpreted=interpreted)

    plgpu.emit_pipeline(
        step,
        grid=(lax.div(tiles - first + (grid - 1), jnp.int32(grid)),),
        in_specs=[
            plgpu.BlockSpec((config.blocks, BLOCK_BYTES), lambda i: (first + i * grid, 0)),
            plgpu.BlockSpec((config.blocks,), lambda i: (first + i * grid,)),
        ],
        out_specs=[plgpu.BlockSpec((config.blocks, BLOCK), lambda i: (first + i * grid, 0))],
        max_concurrent_steps=config.stages,
    )(codes_ref, absmax_ref, out_ref)


def _decode_tile(codes_ref, absmax_ref, out_ref, *, config: MosaicConfig, interpreted: bool):
    """Decode config.blocks blocks from references to references, in shared or global memory."""
    if interpreted:  # neither assembly nor layouts there
        codes, absmax = codes_ref[...], absmax_ref[...]
        decoded = [ptx.lookup_in_jax(codes, absmax[:, None], out_ref.dtype, half) for half in ptx.HALVES]
    else:
        layout = _codes_layout(config.bytes_per_thread)
        codes, absmax = compat.mosaic_load(codes_ref, layout), compat.mosaic_load(absmax_ref, layout.reduce(1))
        decoded = _look_up(codes, absmax, out_ref.dtype, layout)
    out_ref[:, :BLOCK_BYTES], out_ref[:, BLOCK_BYTES:] = decoded


def _codes_layout(bytes_per_thread: int):
    """Codes [blocks, 32] in registers: neighbouring lanes hold neighbouring parts of a block, a warp whole blocks."""
    warp = bytes_per_thread  # blocks of a warp: 32 lanes · bytes / 32 bytes
    tiling = plgpu.Tiling(((4 * warp, BLOCK_BYTES), (warp, BLOCK_BYTES), (bytes_per_thread,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _look_up(codes, absmax, dtype, layout):
    name = jnp.dtype(dtype).name
    count, constraint = ptx.RESULTS[name]
    constraints = ",".join([f"={constraint}"] * (2 * count) + ["r", "f"])
    half_type = plgpu.ShapeDtypeStruct(codes.shape, jnp.dtype(dtype), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=(half_type, half_type))
    def look_up(_, codes, absmax):
        i32 = ir.IntegerType.get_signless(32)
        register = ir.F32Type.get() if constraint == "f" else i32
        results = ir.Type.parse(f"!llvm.struct<({', '.join([str(register)] * (2 * count))})>")
        element = mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))
        absmax = absmax.broadcast_in_dim(codes.shape, (0,), codes.layout)
        halves = [np.empty_like(codes.registers) for _ in ptx.HALVES]
        for index, packed in np.ndenumerate(codes.registers):
            [num_bytes] = ir.VectorType(packed.type).shape
            words = vector.bitcast(ir.VectorType.get((num_bytes // 4,), i32), packed)
            scale = vector.extract(absmax.registers[index], [], [0])
            parts = [[], []]
            for word in range(num_bytes // 4):
                operands = [vector.extract(words, [], [word]), scale]
                decoded = llvm.inline_asm(results, operands, ptx.lookup(name, ptx.HALVES), constraints, asm_dialect=0)
                for position in range(2 * count):
                    parts[position // count].append(llvm.extractvalue(register, decoded, [position]))
            for half, values in zip(halves, parts, strict=True):
                joined = vector.from_elements(ir.VectorType.get((len(values),), register), values)
                half[index] = vector.bitcast(ir.VectorType.get((num_bytes,), element), joined)
        return tuple(mgpu.FragmentedArray(_registers=half, _layout=codes.layout, _is_signed=None) for half in halves)

    return look_up(codes, absmax)
