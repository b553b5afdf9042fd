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
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.mosaic import launch
from pallas_kernels.nf4.codebook import BLOCK, NF4_VALUES
from pallas_kernels.nf4.config import MatvecConfig
from pallas_kernels.nf4.mosaic_sm90.matvec_plan import TOKENS, Plan
from pallas_kernels.nf4.mosaic_sm90.matvec_stages import copy_items, fill_table, load, own_entries, scratch, wait
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
    return _launch(plan, {"x": x, "codes": codes, "absmax": absmax}, tokens, "nf4_matvec", interpret)


@functools.partial(jax.jit, static_argnames=("rows", "config", "cores", "interpret"))
def matvec_items(
    x: Float[Array, "tokens in"],
    codes: UInt8[Array, "matrices out half_in"],
    absmax: Float[Array, "matrices out blocks"],
    items: Int[Array, "items slots+1"],
    count: Int[Array, "1"],
    *,
    rows: int,
    config: MatvecConfig,
    cores: int,
    interpret: Any = None,
) -> Float[Array, "splits rows out"]:
    """Products of rows with one of several packed matrices each, which are read where they lie: their addends.

    A thread block's unit is a tile of an item's matrix, and its eight rows or less.

    Args:
        x: as in `matvec`; row i of the result is of x's row i // (rows // tokens).
        codes: uint8, split order.
        absmax: float32.
        items: of each a matrix, and the rows of the result that are its products, -1 in the place of none; eight at
            most.
        count: items that are in use; those behind them are not read.
        rows: of the result, a multiple of the rows of x. A row of no item is not written.
        config: as in `matvec`.
        cores: as there.
        interpret: as there.

    Returns:
        As there.
    """
    (tokens, summed), (most, width) = x.shape, items.shape
    plan = Plan(width - 1, codes.shape[1], summed, config, 1, most, rows // tokens)
    plan = dataclasses.replace(plan, grid=min(cores, plan.units * most))
    inputs = {"x": x, "codes": codes, "absmax": absmax, "items": items, "count": count}
    return _launch(plan, inputs, rows, "nf4_matvec_items", interpret)


def _launch(plan: Plan, inputs: dict[str, Array], rows: int, name: str, interpret: Any) -> Array:
    dtype, splits = inputs["x"].dtype, plan.config.splits
    sums = {"sums": plgpu.SMEM((max(plan.config.sums(plan.tokens), 16),), jnp.uint8)}
    (product,) = launch(
        functools.partial(_kernel, plan=plan),
        {"items": None, "count": None} | inputs | {"table": _table(dtype)},
        {"out": jax.ShapeDtypeStruct((splits, rows, plan.out), dtype if splits == 1 else jnp.float32)},
        scratch(plan, dtype) | sums,
        name=name,
        grid=("block", plan.grid),
        threads=plan.config.warps // 4,
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
    turns = plan.turns(block, refs.count[0] if plan.items else None)
    load_stage = functools.partial(load, refs, plan, block, turns * plan.steps)
    entries = own_entries(plan, refs.table)
    if plan.items:
        copy_items(refs, plan)
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
        item, first, split = plan.unit(block, turn)
        own = (refs.items_smem.at[item],) if plan.items else ()
        finish(plan, sums, refs.sums, refs.out.at[split, :, pl.ds(first, plan.rows)], *own)
        return carry

    lax.fori_loop(0, turns, unit, None)


def _interpreted(refs, plan: Plan):
    """Compute the sums unit for unit in jax.numpy: the interpreter runs no assembly."""
    block = lax.axis_index("block")
    pairs = lax.bitcast_convert_type(refs.table[...], refs.x.dtype).astype(jnp.float32)

    def unit(turn, _):
        item, first, split = plan.unit(block, turn)
        rows, matrix = pl.ds(first, plan.rows), (refs.items[item, 0],) if plan.items else ()
        codes = refs.codes[*matrix, rows, :].reshape(plan.rows, -1, BLOCK // 2).astype(jnp.int32)
        values = jnp.swapaxes(pairs[codes], 2, 3) * refs.absmax[*matrix, rows, :][:, :, None, None]
        column = lax.iota(jnp.int32, plan.summed)
        own = lax.div(column, jnp.int32(plan.steps * plan.columns)) == split
        weights = jnp.where(own[None], values.reshape(plan.rows, plan.summed), 0.0)
        x = refs.x[...].reshape(-1, plan.summed).astype(jnp.float32)
        total = (lax.dot_general(x, weights, (((1,), (1,)), ((), ()))) / TABLE_SCALE).astype(refs.out.dtype)
        if not plan.items:
            refs.out[split, :, rows] = total
            return
        for token in range(plan.tokens):
            number = refs.items[item, 1 + token]

            @pl.when(number >= 0)
            def _(number=number):
                refs.out[split, number, rows] = total[lax.div(number, jnp.int32(plan.shared))]

    lax.fori_loop(0, plan.turns(block, refs.count[0] if plan.items else None), unit, None)
