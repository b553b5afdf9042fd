"""y = x Wᵀ for a few rows of x, as few as one: bound by the packed bytes.

Persistent thread blocks take tiles of rows of W, or parts of their sums, and read codes, scales and x through a ring of
stages in shared memory, across tiles too (`matvec_stages`). A warp takes whole blocks of 64 columns. Its lane t of four
holds bytes 8t … 8t + 7 of a block; a byte is two codes, and a table in shared memory gives both as the pair of 16-bit
values that an operand register of the tensor cores is. The table has a column for each lane, so that lookups meet no
bank conflict; a byte's address is one byte permutation. A product sums over 16 columns in an order that is free as long
as both operands agree.

The table holds NF4's values, not scaled: sums over a block are multiplied by its absmax in float32. Times
`TABLE_SCALE` the sixteen values are nearly representable in bfloat16, so that they carry an error of 0.06%, where
weights that are rounded to bfloat16 one by one carry 0.11%.

Bounds on an H100, for 4096×14336: 33 MB at 3.0 TB/s take 11 µs; lookups take 4 µs at a conflict-free load a clock and
multiprocessor, the reading of x half as much for each eight of its rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt8

from pallas_kernels.mosaic import launch
from pallas_kernels.nf4.codebook import BLOCK, NF4_VALUES
from pallas_kernels.nf4.config import MatvecConfig
from pallas_kernels.nf4.mosaic_sm90.matvec_plan import TOKENS, Plan
from pallas_kernels.nf4.mosaic_sm90.matvec_stages import fill_table, load, own_entries, scratch, wait
from pallas_kernels.nf4.mosaic_sm90.matvec_sums import TABLE_SCALE, add, finish


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("config", "cores", "interpret"))
def matvec(
    x: Float[Array, "rows in"],
    codes: UInt8[Array, "out half_in"],
    absmax: Float[Array, "out blocks"],
    *,
    config: MatvecConfig,
    cores: int,
    interpret: Any = None,
) -> Float[Array, "splits rows out"]:
    """The product with a packed matrix, summed in float32: its addends.

    Args:
        x: bfloat16 or float16; `in` a multiple of MATVEC_GRAIN.
        codes: uint8, split order; `out` at least `config.rows`.
        absmax: float32.
        config: block sizes.
        cores: multiprocessors; each runs one thread block.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.

    Returns:
        The product in the dtype of x, or `config.splits` addends of it in float32.
    """
    (tokens, summed), out = x.shape, codes.shape[0]
    plan = Plan(tokens, out, summed, config, 1)
    plan = dataclasses.replace(plan, grid=min(cores, plan.units))
    if plan.by_tma and tokens % TOKENS:  # TMA takes whole tiles
        x = jnp.pad(x, ((0, -tokens % TOKENS), (0, 0)))
        return matvec(x, codes, absmax, config=config, cores=cores, interpret=interpret)[:, :tokens]
    sums = {"sums": plgpu.SMEM((max(config.sums(tokens), 16),), jnp.uint8)}
    (product,) = launch(
        functools.partial(_kernel, plan=plan),
        {"x": x, "codes": codes, "absmax": absmax, "table": _table(x.dtype)},
        {"out": jax.ShapeDtypeStruct((config.splits, tokens, out), x.dtype if config.splits == 1 else jnp.float32)},
        scratch(plan, x.dtype) | sums,
        name="nf4_matvec",
        grid=("block", plan.grid),
        threads=config.warps // 4,
        interpret=interpret,
    )
    return product


def _table(dtype) -> Array:
    """int32 [256]: for each byte of codes the values of its low and its high code, in this order."""
    values = jnp.asarray(NF4_VALUES * np.float32(TABLE_SCALE)).astype(dtype)
    byte = np.arange(256)
    return lax.bitcast_convert_type(jnp.stack([values[byte & 15], values[byte >> 4]], axis=1), jnp.int32)


def _kernel(refs, *, plan: Plan):
    if refs.interpreted:
        pl.when(lax.axis_index("warpgroup") == 0)(functools.partial(_interpreted, refs, plan))
        return
    block, stages = lax.axis_index("block"), plan.config.stages
    turns = lax.div(plan.units + plan.grid - 1 - block, jnp.int32(plan.grid))
    load_stage = functools.partial(load, refs, plan, block, turns * plan.steps)
    entries = own_entries(plan, refs.table)
    for stage in range(stages - 1):
        load_stage(jnp.int32(stage))
    fill_table(plan, entries, refs.table_smem)

    def unit(turn, carry):
        def step(number, sums):
            iteration = turn * plan.steps + number
            slot = lax.rem(iteration, jnp.int32(stages))
            wait(refs, plan, iteration)
            # Into the stage that all have read. In flight from here on: the stages but this one.
            load_stage(iteration + (stages - 1))
            stage = refs.codes_smem.at[slot], refs.scales_smem.at[slot], refs.x_smem.at[slot]
            return add(plan, sums, *stage, refs.table_smem)

        sums = plgpu.layout_cast(jnp.zeros((64, 8 * plan.pieces), jnp.float32), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, plan.steps, step, sums)
        first, split = plan.unit(block, turn)
        finish(plan, sums, refs.sums, refs.out.at[split, :, pl.ds(first, plan.rows)])
        return carry

    lax.fori_loop(0, turns, unit, None)


def _interpreted(refs, plan: Plan):
    """Compute the sums unit for unit in jax.numpy: the interpreter runs no assembly."""
    block, splits = lax.axis_index("block"), plan.config.splits
    pairs = lax.bitcast_convert_type(refs.table[...], refs.x.dtype).astype(jnp.float32)

    def unit(turn, _):
        number = block + turn * plan.grid
        rows = pl.ds(
            lax.min(lax.div(number, jnp.int32(splits)) * plan.rows, jnp.int32(plan.out - plan.rows)), plan.rows
        )
        split = lax.rem(number, jnp.int32(splits))
        codes = refs.codes[rows, :].reshape(plan.rows, -1, BLOCK // 2).astype(jnp.int32)
        values = jnp.swapaxes(pairs[codes], 2, 3) * refs.absmax[rows, :][:, :, None, None]
        column = lax.iota(jnp.int32, plan.summed)
        own = lax.div(column, jnp.int32(plan.steps * plan.columns)) == split
        weights = jnp.where(own[None], values.reshape(plan.rows, plan.summed), 0.0)
        x = refs.x[...].reshape(plan.tokens, plan.summed).astype(jnp.float32)
        total = lax.dot_general(x, weights, (((1,), (1,)), ((), ())))
        refs.out[split, :, rows] = (total / TABLE_SCALE).astype(refs.out.dtype)

    turns = lax.div(plan.units + plan.grid - 1 - block, jnp.int32(plan.grid))
    lax.fori_loop(0, turns, unit, None)
