"""Check and time the split and turn of queries, keys and values on this machine's card, beside XLA's path.

    python scripts/measure_split_rope.py             everything
    python scripts/measure_split_rope.py check       only this part; the other is "speed"

Times are medians over interleaved rounds, out of a cold cache; the rate counts the product and the tables read once and
the results written once.
"""

import functools
import math
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fastjax.bench.timing import Program, compile_all, measure
from pallas_kernels import compat
from pallas_kernels.split_rope import reference, split_rope, triton
from pallas_kernels.split_rope.config import Tiles, common, tiles
from pallas_kernels.split_rope.implementations import REGISTRY

#: Operands of a run, together larger than the cache.
COPIES = 4


class Case(NamedTuple):
    """A call.

    Attributes:
        batch: B.
        length: S.
        heads: H and K.
        size: D.
        turning: features of a head that turn, R.
        interleaved: whether the pairs are neighbours.
        scaled: whether queries are scaled.
    """

    batch: int
    length: int
    heads: tuple[int, int]
    size: int
    turning: int
    interleaved: bool = False
    scaled: bool = False

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.batch * self.length

    @property
    def width(self) -> int:
        """Features of the product."""
        return (self.heads[0] + 2 * self.heads[1]) * self.size


LARGE = Case(4, 2048, (32, 8), 128, 128)
CASES = {
    "8B": LARGE,
    "8B, neighbours": LARGE._replace(interleaved=True),
    "8B, a quarter turns, scaled": LARGE._replace(turning=32, scaled=True),
    "8B, nothing turns": LARGE._replace(turning=0),
    "14 and 2 heads of 64": Case(4, 2048, (14, 2), 64, 64),
    "16 and 8 heads of 256": Case(4, 2048, (16, 8), 256, 256),
    "32 and 32 heads of 80": Case(4, 2048, (32, 32), 80, 32),
    "9 and 3 heads of 64": Case(4, 2048, (9, 3), 64, 64),
    "1001 tokens": Case(1, 1001, (32, 8), 128, 128),
}
#: Block sizes beside the chosen ones, where the heads allow them: tokens, heads, warps.
OTHERS = [(16, 2, 4), (32, 2, 8), (32, 2, 4), (64, 2, 8), (8, 2, 2), (8, 2, 4), (4, 2, 1), (1, 8, 1), (8, 8, 4)]
OTHERS_OF_ONE = [(16, 1, 4), (32, 1, 8), (64, 1, 8), (16, 1, 1), (8, 1, 1)]


@functools.partial(jax.jit, static_argnums=(0,))
def operands(case: Case, key: int):
    """A product, the gradients of its parts, tables and scales."""
    keys, rows = jax.random.split(jax.random.key(key), 6), (case.batch, case.length)

    def normal(number: int, *shape: int) -> jax.Array:
        return jax.random.normal(keys[number], (*rows, *shape), jnp.bfloat16)

    counts = case.heads[0], case.heads[1], case.heads[1]
    gradients = tuple(normal(number + 1, count, case.size) for number, count in enumerate(counts))
    angles = jax.random.uniform(keys[4], (*rows, case.turning // 2), maxval=6.0)
    tables = (jnp.cos(angles), jnp.sin(angles)) if case.turning else None
    scales = jax.random.uniform(keys[5], rows, minval=0.5, maxval=2.0) if case.scaled else None
    return normal(0, case.width), gradients, tables, scales


def kernel(case: Case, backward: bool, block: Tiles):
    """The kernel with these block sizes, of what `operands` gives."""
    static = triton.Static(case.heads, case.interleaved, block)

    def call(qkv, gradients, tables, scales):
        if backward:
            return triton.backward(gradients, tables, scales, static)
        return triton.forward(qkv, tables, scales, static)

    return call


def plain(case: Case, backward: bool):
    """XLA's path, likewise."""

    def call(qkv, gradients, tables, scales):
        if backward:
            return REGISTRY["xla"].backward(gradients, tables, scales, case.interleaved)
        return REGISTRY["xla"].forward(qkv, tables, scales, case.heads, case.interleaved)

    return call


def check() -> None:
    """Largest errors of values and gradient against float32, in units of 2⁻⁸ of the value: a rounding is at most 1."""
    for title, case in CASES.items():
        qkv, gradients, tables, scales = operands(case, 0)
        cos, sin = tables or (None, None)
        options = {"heads": case.heads[0], "key_heads": case.heads[1], "interleaved": case.interleaved}

        def run(function, qkv, gradients, cos=cos, sin=sin, scales=scales, options=options):
            call = functools.partial(function, cos=cos, sin=sin, query_scales=scales, **options)
            values, pullback = jax.vjp(call, qkv)
            return *values, *pullback(gradients)

        exact = jax.jit(functools.partial(run, reference.split_rope))
        expected = exact(qkv.astype(jnp.float32), jax.tree.map(lambda array: array.astype(jnp.float32), gradients))
        errors = []
        for implementation in ("triton", "xla"):
            found = jax.jit(functools.partial(run, functools.partial(split_rope, implementation=implementation)))(
                qkv, gradients
            )
            worst = [
                float(jnp.max(jnp.abs(ours.astype(jnp.float32) - theirs) / jnp.maximum(jnp.abs(theirs), 1.0)) * 256)
                for ours, theirs in zip(found, expected, strict=True)
            ]
            errors.append(f"{implementation} " + " ".join(f"{error:.2f}" for error in worst))
        print(f"check {title:30s} q, k, v, dqkv: {'; '.join(errors)}", flush=True)


def speed() -> None:
    """The chosen block sizes and others."""
    for title, case in CASES.items():
        chosen = tiles(*case.heads, case.size)
        others = OTHERS if chosen.heads > 1 else OTHERS_OF_ONE
        fitting = (Tiles(*other) for other in others if other[1] <= common(*case.heads))
        blocks = list(dict.fromkeys([chosen, *fitting]))
        data = [operands(case, number) for number in range(COPIES)]
        for backward in (False, True):
            calls = {"XLA": plain(case, backward)}
            calls |= {
                f"{block.rows}×{block.heads}, {block.num_warps} warps": kernel(case, backward, block)
                for block in blocks
            }
            programs = [
                Program(f"p{number}", lambda *data, call=call: [call(*one) for one in data], tuple(data), COPIES)
                for number, call in enumerate(calls.values())
            ]
            results = compile_all(programs)
            failed = {name: result for name, result in results.items() if isinstance(result, Exception)}
            compiled = {name: result for name, result in results.items() if not isinstance(result, Exception)}
            timings = measure([program for program in programs if program.name in compiled], 7, compiled)
            moved = 2 * 2 * case.tokens * case.width + 4 * case.tokens * case.turning
            moved += 4 * case.tokens * math.ceil(case.scaled)
            print(f"== {title}, {'backward' if backward else 'forward'}, {moved / 2**20:.1f} MiB", flush=True)
            for number, name in enumerate(calls):
                if f"p{number}" in failed:
                    print(f"  {name:24s} failed: {' '.join(str(failed[f'p{number}']).split())[:140]}", flush=True)
                    continue
                timing = timings[f"p{number}"]
                spread = f"{timing.best * 1e6:.1f}–{timing.worst * 1e6:.1f}"
                rate = moved / timing.median / 1e9
                print(f"  {name:24s} {timing.median * 1e6:7.1f} µs {spread:>15s} {rate:6.0f} GB/s", flush=True)


PARTS = {"check": check, "speed": speed}

if __name__ == "__main__":
    compat.silence_triton_deprecation()
    print(jax.devices(), jax.__version__, flush=True)
    for chosen in sys.argv[1:] or PARTS:
        PARTS[chosen]()
