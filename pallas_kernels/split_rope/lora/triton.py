"""The way forward between the qkv projection with adapters and attention in Pallas-Triton, from Ampere on; see `api`.

A program owns some heads of queries, of keys or of values for a tile of tokens, for which it reads the angles once.
"""

import functools
import math

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.float8.scaled import Scaled, product_of, values_at
from pallas_kernels.split_rope.lora.config import Tiles
from pallas_kernels.tiles import divisor


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def forward(
    base: Array | Scaled,
    products: Array,
    lora_B: Array,
    cos: Array,
    sin: Array,
    heads: tuple[int, int],
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Queries and keys, turned, and values."""
    (queries, keys), (rows, features) = heads, product_of(base).shape
    size, number = features // (queries + 2 * keys), divisor(math.gcd(queries, keys), tiles.heads)
    groups = queries // number, keys // number, keys // number
    loop = divisor(rows // tiles.rows, tiles.loop)
    widths = [count * number * size for count in groups]
    return pl.pallas_call(
        functools.partial(_forward, groups=groups, number=number, size=size, tiles=tiles, loop=loop),
        out_shape=tuple(jax.ShapeDtypeStruct((rows, width), product_of(base).dtype) for width in widths),
        grid=(sum(groups), rows // tiles.rows // loop),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="split_rope_lora_forward",
    )(base, products, lora_B, cos, sin)


def _forward(base_ref, products_ref, b_ref, cos_ref, sin_ref, *out_refs, groups, number, size, tiles, loop):
    half, rank, share = size // 2, b_ref.shape[1], pl.program_id(1)

    def part(which: int, group):
        shared = products_ref.shape[1] == rank
        columns = pl.ds(0 if shared else which * rank, rank)
        first_head = sum(groups[:which]) * number

        def body(index, carry):
            rows = pl.ds((share * loop + index) * tiles.rows, tiles.rows)
            products = products_ref[rows, columns]
            cos, sin = (None, None) if which == 2 else (cos_ref[rows, :], sin_ref[rows, :])

            def of_head(head, carry):
                own = (group * number + head) * size
                halves = []
                for start in (own, own + half):
                    cols = pl.ds(first_head * size + start, half)
                    through = pltriton.dot(products, b_ref[cols, :], trans_b=True)
                    halves.append(values_at(base_ref, rows, cols) + through)
                first, second = halves
                if which < 2:
                    first, second = first * cos - second * sin, second * cos + first * sin
                out_refs[which][rows, pl.ds(own, half)] = first.astype(out_refs[which].dtype)
                out_refs[which][rows, pl.ds(own + half, half)] = second.astype(out_refs[which].dtype)
                return carry

            return jax.lax.fori_loop(0, number, of_head, carry)

        jax.lax.fori_loop(0, loop, body, 0)

    _of_each_part(part, groups)


def _of_each_part(part, groups: tuple[int, int, int]) -> None:
    """Run the part, of queries, keys or values, that the program is of, with its number there."""
    program, start = pl.program_id(0), 0
    for which, count in enumerate(groups):
        here = (program >= start) & (program < start + count)
        pl.when(here)(functools.partial(part, which, program - start))
        start += count
