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
from pallas_kernels.tiles import divisor

#: Head sizes whose halves are tiles' widths.
SIZES = (32, 64, 128, 256)
#: Tokens of a tile, and most heads of a program.
_ROWS, _HEADS = 32, 4


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(5, 6))
def forward(
    base: Array | Scaled,
    products: Array,
    lora_B: Array,
    cos: Array,
    sin: Array,
    heads: tuple[int, int],
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Queries and keys, turned, and values."""
    (queries, keys), (rows, features) = heads, product_of(base).shape
    size, number = features // (queries + 2 * keys), divisor(math.gcd(queries, keys), _HEADS)
    groups = queries // number, keys // number, keys // number
    widths = [count * number * size for count in groups]
    return pl.pallas_call(
        functools.partial(_forward, groups=groups, number=number, size=size),
        out_shape=tuple(jax.ShapeDtypeStruct((rows, width), product_of(base).dtype) for width in widths),
        grid=(sum(groups), rows // _ROWS),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="split_rope_lora_forward",
    )(base, products, lora_B, cos, sin)


def _forward(base_ref, products_ref, b_ref, cos_ref, sin_ref, *out_refs, groups, number, size):
    half, rank, rows = size // 2, b_ref.shape[1], pl.ds(pl.program_id(1) * _ROWS, _ROWS)

    def part(which: int, group):
        shared = products_ref.shape[1] == rank
        products = products_ref[rows, pl.ds(0 if shared else which * rank, rank)]
        first_head = sum(groups[:which]) * number
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

        jax.lax.fori_loop(0, number, of_head, 0)

    program, start = pl.program_id(0), 0
    for which, count in enumerate(groups):  # of queries, of keys or of values
        here = (program >= start) & (program < start + count)
        pl.when(here)(functools.partial(part, which, program - start))
        start += count
