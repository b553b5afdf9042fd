"""Dequantisation.

Many small thread blocks of one warpgroup, no shared memory: each thread loads a few consecutive codes of a block from
global memory, decodes them by `ptx.lookup` and stores both halves as they come. A persistent form with tiles in flight
through shared memory (TMA) is 8% slower: loads are a fifth of the traffic, and 2,048 threads hide them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import vector
from jaxtyping import Array, Float, UInt8

from pallas_kernels import compat
from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.mosaic_sm90.lookup import joined, look_up_word, words_of
from pallas_kernels.shard_gather import Shared


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("dtype", "tile", "through", "interpret"))
def dequantize(
    codes: UInt8[Array, "blocks 32"],
    absmax: Float[Array, " blocks"],
    *,
    dtype: DTypeLike,
    tile: int,
    through: str | None = None,
    interpret: Any = None,
) -> Float[Array, "blocks 64"]:
    """Decode whole blocks, at least `tile` of them.

    Args:
        codes: uint8, split order.
        absmax: float32.
        dtype: bfloat16, float16 or float32.
        tile: blocks of one, as `config.mosaic_blocks`.
        through: dtype that values are rounded to before a 16-bit `dtype`; None for none.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    blocks = absmax.size
    kernel = plgpu.kernel(
        functools.partial(_kernel, tile=tile, through=through, interpreted=interpret is not None),
        out_type=jax.ShapeDtypeStruct((blocks, BLOCK), dtype),
        grid=(pl.cdiv(blocks, tile),),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # nothing here is both read and written
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="nf4_dequantize",
        interpret=interpret,
    )
    return kernel(codes, absmax)


# Under jit of its own, as above.
@functools.partial(jax.jit, static_argnames=("dtype", "tile", "through", "interpret"))
def dequantize_shared(
    codes: Shared,
    absmax: Float[Array, " blocks"],
    *,
    dtype: DTypeLike,
    tile: int,
    through: str | None = None,
    interpret: Any = None,
) -> Float[Array, "blocks 64"]:
    """Decode whole blocks of which each device has a share, read where they lie; the others' take the link meanwhile.

    Args:
        codes: uint8 [blocks, 32], split order; at least `tile` a device.
        absmax: float32.
        dtype: as for `dequantize`.
        tile: blocks of one, as `config.mosaic_blocks`.
        through: as for `dequantize`.
        interpret: as for `shard_gather.mosaic_sm90.gather`.
    """
    share, interpreted = codes.stack.shape[-2], interpret is not None
    kernel = plgpu.kernel(
        functools.partial(
            _shared_kernel,
            tile=tile,
            through=through,
            axis_name=codes.axis_name,
            devices=codes.devices,
            interpreted=interpreted,
        ),
        out_type=jax.ShapeDtypeStruct((absmax.size, BLOCK), dtype),
        grid=(codes.devices * pl.cdiv(share, tile),),
        grid_names=("tile",),
        compiler_params=compat.reading_peers(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="nf4_dequantize_shared",
        interpret=interpret,
    )
    return kernel(jnp.reshape(codes.layer, 1), codes.stack, absmax)


def _shared_kernel(
    layer_ref,
    stack_ref,
    absmax_ref,
    out_ref,
    *,
    tile: int,
    through: str | None,
    axis_name: str,
    devices: int,
    interpreted: bool,
):
    # Neighbouring thread blocks read from different devices, this one first: the link and the memory work together.
    count, share, number = jnp.int32(devices), stack_ref.shape[-2], lax.axis_index("tile")
    device = count - 1 if interpreted else lax.axis_index(axis_name)
    place = lax.rem(device + lax.rem(number, count), count)
    first = _first(lax.div(number, count), share, tile)
    there = compat.peer_ref(stack_ref, axis_name, place, interpreted=interpreted)
    codes_ref, rows = there.at[layer_ref[0], pl.ds(first, tile)], pl.ds(place * share + first, tile)
    _decode(codes_ref, absmax_ref.at[rows], out_ref.at[rows], tile=tile, through=through, interpreted=interpreted)


def _kernel(codes_ref, absmax_ref, out_ref, *, tile: int, through: str | None, interpreted: bool):
    rows = pl.ds(_first(lax.axis_index("tile"), out_ref.shape[0], tile), tile)
    refs = codes_ref.at[rows], absmax_ref.at[rows], out_ref.at[rows]
    _decode(*refs, tile=tile, through=through, interpreted=interpreted)


def _first(number, blocks: int, tile: int):
    """A tile's first block. The last tile is moved back to end with the array: it repeats what its neighbour writes."""
    return lax.min(number * tile, jnp.int32(blocks - tile))


def _decode(codes_ref, absmax_ref, out_ref, *, tile: int, through: str | None, interpreted: bool):
    if interpreted:  # neither assembly nor layouts there
        codes, absmax = codes_ref[...], absmax_ref[...][:, None]
        decoded = [ptx.lookup_in_jax(codes, absmax, out_ref.dtype, half, through) for half in ptx.HALVES]
    else:
        layout = _codes_layout(tile // 4)
        codes, absmax = compat.mosaic_load(codes_ref, layout), compat.mosaic_load(absmax_ref, layout.reduce(1))
        decoded = _look_up(codes, absmax, out_ref.dtype, layout, through)
    out_ref[:, :BLOCK_BYTES], out_ref[:, BLOCK_BYTES:] = decoded


def _codes_layout(bytes_per_thread: int):
    """Codes [blocks, 32] in registers: neighbouring lanes hold neighbouring parts of a block, a warp whole blocks."""
    warp = bytes_per_thread  # blocks of a warp: 32 lanes · bytes / 32 bytes
    tiling = plgpu.Tiling(((4 * warp, BLOCK_BYTES), (warp, BLOCK_BYTES), (bytes_per_thread,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _look_up(codes, absmax, dtype, layout, through: str | None):
    """Both halves of the decoded blocks, each [blocks, 32] in the layout of the codes."""
    half_type = plgpu.ShapeDtypeStruct(codes.shape, jnp.dtype(dtype), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=(half_type, half_type))
    def look_up(_, codes, absmax):
        absmax = absmax.broadcast_in_dim(codes.shape, (0,), codes.layout)
        halves = [np.empty_like(codes.registers) for _ in ptx.HALVES]
        for index, packed in np.ndenumerate(codes.registers):
            scale = vector.extract(absmax.registers[index], [], [0])
            words = [look_up_word(word, scale, dtype, through) for word in words_of(packed)]
            for half, *parts in zip(halves, *words, strict=True):
                half[index] = joined([register for part in parts for register in part], dtype)
        return tuple(mgpu.FragmentedArray(_registers=half, _layout=codes.layout, _is_signed=None) for half in halves)

    return look_up(codes, absmax)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away
