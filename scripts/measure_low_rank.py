"""Check and time the kernels around projections with adapters on this machine's card, tile by tile, beside XLA.

    python scripts/measure_low_rank.py                        everything
    python scripts/measure_low_rank.py check norms rope       only these parts

The shapes are those of a layer of Llama 3 8B with 8,192 tokens. Every figure is the median over interleaved rounds,
device time of the kernels, in microseconds; beside it stands what the bytes take at 4.2 TB/s. Tiles that do not compile
or whose registers spill are left out by name.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.bench.timing import Program, compile_all, measure
from pallas_kernels import compat
from pallas_kernels.float8 import config as float8_config
from pallas_kernels.float8 import quantize_rows
from pallas_kernels.low_rank import block_matrix
from pallas_kernels.low_rank import rounding as rounded
from pallas_kernels.low_rank import triton as low_rank
from pallas_kernels.rms_norm.lora import forward as normed
from pallas_kernels.rms_norm.lora import triton as norm
from pallas_kernels.split_rope.lora import triton as turn
from pallas_kernels.split_rope.lora.config import Tiles as HeadTiles
from pallas_kernels.tiles import Tiles

START = time.time()
TOKENS, WIDTH, HEADS, SIZE, RANK = 8192, 4096, (32, 8), 128, 16
FEATURES = 14336
PASS = 2 * TOKENS * WIDTH  # bytes of a residual stream

Run = tuple[Callable[..., Any], tuple[Any, ...]]


def say(*words: Any) -> None:
    """Print at once, so that an interrupted run keeps its output."""
    print(f"{time.time() - START:6.1f}", *words, flush=True)


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random numbers."""
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def grid(shapes: Iterable[tuple[int, int, int]], loops: Iterable[int], stages: Iterable[int], kind: Any) -> list[Any]:
    """Block sizes: (rows, columns or heads, warps) by tiles a program by tiles in flight."""
    return [
        kind(rows, columns, loop, warps, flight)
        for (rows, columns, warps), loop, flight in itertools.product(shapes, loops, stages)
    ]


def dot(left: jax.Array, right: jax.Array, dims: Any, dtype: Any = None) -> jax.Array:
    """A matrix product as XLA chooses it."""
    return jax.lax.dot_general(left, right, (dims, ((), ())), preferred_element_type=dtype)


# the plain forms: what XLA is given where there is no kernel, and the oracle in float32


def plain_add(residual, base, products, lora_B):
    """The sum residual + base + products·Bᵀ."""
    return residual + (base + dot(products, lora_B, ((1,), (1,))))


def plain_outputs(dy, products, lora_B):
    """The products dy·B and dyᵀ·products."""
    return dot(dy, lora_B, ((1,), (0,))), dot(dy, products, ((0,), (0,)), jnp.float32)


def plain_inputs(dx, x, dproducts, lora_A):
    """The sum dx + dproducts·A, and dproductsᵀ·x."""
    return dx + dot(dproducts, lora_A, ((1,), (0,))), dot(dproducts, x, ((0,), (0,)), jnp.float32)


def row_mean(x, scale, rstd, dnormed, dproducts, products):
    """The mean of g·n, as the norm's kernel takes it."""
    own = jnp.sum(dnormed.astype(jnp.float32) * (x.astype(jnp.float32) * scale[None]), axis=1) * rstd
    return (own + jnp.sum(dproducts.astype(jnp.float32) * products.astype(jnp.float32), axis=1)) / x.shape[1]


def plain_norm(x, scale, rstd, lora_A, dresidual, dnormed, dproducts):
    """The gradients of x and A."""
    dnormed = (dnormed + dot(dproducts, lora_A, ((1,), (0,)))).astype(jnp.float32)
    unit, g = x.astype(jnp.float32) * rstd[:, None], dnormed * scale[None]
    dx = dresidual + (rstd[:, None] * (g - unit * jnp.mean(g * unit, axis=1, keepdims=True))).astype(x.dtype)
    normed = (unit.astype(x.dtype).astype(jnp.float32) * scale[None]).astype(x.dtype)
    return dx, dot(dproducts, normed, ((0,), (0,)), jnp.float32)


def rotated(x, cos, sin):
    """The turned heads, in the dtype of x."""
    wide = x.astype(jnp.float32).reshape(x.shape[0], -1, 2 * cos.shape[1])
    first, second = jnp.split(wide, 2, axis=2)
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
    return turned.reshape(x.shape).astype(x.dtype)


def block_B(lora_B, bounds):
    """B of the three parts, each in columns of its own."""
    rank = lora_B.shape[1]
    parts = [jnp.pad(lora_B[a:b], ((0, 0), (n * rank, (2 - n) * rank))) for n, (a, b) in enumerate(bounds)]
    return jnp.concatenate(parts)


def bounds_of(heads, size):
    """The rows of queries, keys and values."""
    ends = np.cumsum([0, heads[0] * size, heads[1] * size, heads[1] * size])
    return list(itertools.pairwise(int(end) for end in ends))


def plain_turn(base, products, lora_B, cos, sin, heads):
    """Queries and keys, turned, and values."""
    bounds = bounds_of(heads, 2 * cos.shape[1])
    y = base + dot(products, block_B(lora_B, bounds), ((1,), (1,)))
    q, k, v = (jax.lax.optimization_barrier(y[:, a:b]) for a, b in bounds)
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def plain_return(products, lora_B, cos, sin, dq, dk, dv):
    """The gradients of base, products and B."""
    size = 2 * cos.shape[1]
    bounds = bounds_of((dq.shape[1] // size, dk.shape[1] // size), size)
    dy = jnp.concatenate([rotated(dq, cos, -sin), rotated(dk, cos, -sin), dv], axis=1)
    dB, rank = dot(dy, products, ((0,), (0,)), jnp.float32), lora_B.shape[1]
    own = [dB[a:b, n * rank : (n + 1) * rank] for n, (a, b) in enumerate(bounds)]
    return dy, dot(dy, block_B(lora_B, bounds), ((1,), (0,))), jnp.concatenate(own)


def by_kernel_return(products, lora_B, cos, sin, dq, dk, dv, tiles):
    """The same: XLA turns back, the kernel makes the other gradients from the result."""
    dy = jnp.concatenate([rotated(dq, cos, -sin), rotated(dk, cos, -sin), dv], axis=1)
    sizes = tuple(array.shape[1] for array in (dq, dk, dv))
    return dy, *low_rank.output_gradients(dy, products, lora_B, sizes, None, tiles)


class Operands:
    """Random operands for `tokens` tokens, `width` features and the heads given."""

    def __init__(self, tokens: int, width: int, heads: tuple[int, int], size: int, rank: int = RANK):
        out = (heads[0] + 2 * heads[1]) * size
        self.heads = heads
        self.stream = [normal(seed, tokens, width) for seed in range(3)]
        self.thin, self.b, self.a = normal(3, tokens, rank), normal(4, width, rank, scale=0.1), normal(5, rank, width)
        self.a = self.a * jnp.bfloat16(0.1)
        self.scale = 1 + normal(6, width, scale=0.1, dtype=jnp.float32)
        self.rstd = 1 + normal(7, tokens, scale=0.1, dtype=jnp.float32)
        self.base, self.thins = normal(8, tokens, out), normal(9, tokens, 3 * rank)
        self.out_b = normal(10, out, rank, scale=0.1)
        angles = normal(11, tokens, size // 2, dtype=jnp.float32)
        self.cos, self.sin = jnp.cos(angles), jnp.sin(angles)
        self.dparts = [normal(12 + n, tokens, b - a) for n, (a, b) in enumerate(bounds_of(heads, size))]

    def of_add(self) -> tuple[Any, ...]:
        """Those of `low_rank.add`."""
        return (*self.stream[:2], self.thin, self.b)

    def of_outputs(self) -> tuple[Any, ...]:
        """Those of `low_rank.output_gradients`."""
        return self.stream[0], self.thin, self.b

    def of_inputs(self) -> tuple[Any, ...]:
        """Those of `low_rank.input_gradients`."""
        return (*self.stream[:2], self.thin, self.a)

    def of_norm(self) -> tuple[Any, ...]:
        """Those of `plain_norm`."""
        return self.stream[0], self.scale, self.rstd, self.a, *self.stream[1:], self.thin

    def of_turn(self) -> tuple[Any, ...]:
        """Those of `turn.forward` before the heads."""
        return self.base, self.thins, self.out_b, self.cos, self.sin

    def of_return(self) -> tuple[Any, ...]:
        """Those of `plain_return`."""
        return self.thins, self.out_b, self.cos, self.sin, *self.dparts


def normed_products(x, scale, rstd, lora_A):
    """The rank products of the normalised rows."""
    return dot((x.astype(jnp.float32) * rstd[:, None] * scale[None]).astype(x.dtype), lora_A, ((1,), (1,)))


def by_kernel(operands: Operands, tiles: Tiles, head_tiles: HeadTiles) -> dict[str, Any]:
    """The results of all kernels."""
    x, scale, rstd, a, dresidual, dnormed, dproducts = operands.of_norm()
    mean = row_mean(x, scale, rstd, dnormed, dproducts, normed_products(x, scale, rstd, a))
    return {
        "add": low_rank.add(*operands.of_add(), (operands.stream[0].shape[1],), tiles),
        "outputs": low_rank.output_gradients(*operands.of_outputs(), (operands.stream[0].shape[1],), None, tiles),
        "inputs": low_rank.input_gradients(*operands.of_inputs(), tiles),
        "norm": norm.backward(x, scale, rstd, mean, a, dresidual, dnormed, dproducts, tiles),
        "turn": turn.forward(*operands.of_turn(), operands.heads, head_tiles),
        "return": by_kernel_return(*operands.of_return(), tiles=tiles),
    }


def by_xla(operands: Operands, dtype: Any) -> dict[str, Any]:
    """The same, plain, in a dtype."""

    def cast(arrays):
        return [array.astype(dtype) if array.dtype == jnp.bfloat16 else array for array in arrays]

    with jax.default_matmul_precision("highest"):
        return {
            "add": plain_add(*cast(operands.of_add())),
            "outputs": plain_outputs(*cast(operands.of_outputs())),
            "inputs": plain_inputs(*cast(operands.of_inputs())),
            "norm": plain_norm(*cast(operands.of_norm())),
            "turn": plain_turn(*cast(operands.of_turn()), heads=operands.heads),
            "return": plain_return(*cast(operands.of_return())),
        }


def distances(found: Any, expected: Any) -> str:
    """‖found - expected‖ / ‖expected‖ of each leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    wide = [(np.asarray(f, np.float64), np.asarray(e, np.float64)) for f, e in pairs]
    return " ".join(f"{np.linalg.norm(f - e) / np.linalg.norm(e):.2e}" for f, e in wide)


def check() -> None:
    """Kernels in bfloat16 against float32, beside XLA's in bfloat16; and twice the same bits."""
    for rank in (16, 64):
        operands = Operands(2048, 1024, (8, 4), 128, rank)
        exact, plain = by_xla(operands, jnp.float32), by_xla(operands, jnp.bfloat16)
        # three runs of several tiles a feature
        sizes = Tiles(64, 64, 8, 4, 2), HeadTiles(64, 2, 8, 8, 2)
        found, again = (by_kernel(operands, *sizes) for _ in range(2))
        same = jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), found, again))
        say(f"r={rank}: the same bits twice: {same}")
        for name, expected in exact.items():
            say(f"  {name:8s} kernel", distances(found[name], expected), "| XLA", distances(plain[name], expected))


WIDE = ((64, 64, 4), (64, 128, 4), (32, 128, 4), (128, 128, 8), (32, 256, 8))
SMALL = ((16, 128, 4), (16, 64, 4), (16, 64, 2), (16, 128, 8), (32, 64, 8), (32, 32, 4), (16, 256, 8), (32, 64, 4))


def add(operands: Operands) -> None:
    """The sum residual + base + products·Bᵀ."""
    tiles = grid(WIDE, (1, 2), (1,), Tiles)
    runs: dict[Any, Run] = {t: (lambda *args, t=t: low_rank.add(*args, (WIDTH,), t), operands.of_add()) for t in tiles}
    table("add", 3 * PASS, runs | {"XLA": (plain_add, operands.of_add())})


def outputs(operands: Operands) -> None:
    """The products dy·B and dyᵀ·products in one pass over dy."""
    tiles = grid(WIDE, (16, 32), (3, 4), Tiles)
    args = operands.of_outputs()
    runs: dict[Any, Run] = {
        t: (lambda *args, t=t: low_rank.output_gradients(*args, (WIDTH,), None, t), args) for t in tiles
    }
    table("outputs", PASS, runs | {"XLA": (plain_outputs, args)})


def inputs(operands: Operands) -> None:
    """The sum dx + dproducts·A, and dproductsᵀ·x in one pass over both."""
    tiles = grid(WIDE, (16, 32), (3, 4), Tiles)
    args = operands.of_inputs()
    runs: dict[Any, Run] = {t: (lambda *args, t=t: low_rank.input_gradients(*args, t), args) for t in tiles}
    table("inputs", 3 * PASS, runs | {"XLA": (plain_inputs, args)})


def norms(operands: Operands) -> None:
    """The backward pass of a norm with the residual's gradient and A's; the mean over rows by XLA is in all."""
    x, scale, rstd, a, dresidual, dnormed, dproducts = operands.of_norm()
    products = normed_products(x, scale, rstd, a)

    def whole(products, x, scale, rstd, a, dresidual, dnormed, dproducts, tiles):
        mean = row_mean(x, scale, rstd, dnormed, dproducts, products)
        return norm.backward(x, scale, rstd, mean, a, dresidual, dnormed, dproducts, tiles)

    runs: dict[Any, Run] = {
        t: (lambda *args, t=t: whole(*args, tiles=t), (products, *operands.of_norm()))
        for t in grid((*SMALL, (64, 64, 4)), (16, 32), (2, 3, 4), Tiles)
    }
    table("norm", 6 * PASS, runs | {"XLA": (plain_norm, operands.of_norm())})
    mean = lambda *args: row_mean(*args)  # noqa: E731
    table("the mean alone", 2 * PASS, {"XLA": (mean, (x, scale, rstd, dnormed, dproducts, products))})


def rounding(operands: Operands) -> None:
    """Rows in float8 with their rank products: of a norm, and of gradients whose largest magnitudes are known.

    Beside those stand XLA's products, and the kernel that rounds rows.
    """
    x, scale, rstd, a = operands.of_norm()[:4]
    runs: dict[Any, Run] = {
        t: (lambda x, rstd, a, t=t: normed.products(x, rstd, a, t), (x, rstd, a))
        for t in grid(WIDE, (8, 16), (3, 4), Tiles)
    }
    plain = lambda x, scale, rstd, a: normed_products(x, scale, rstd, a)  # noqa: E731
    table("norm's products", PASS, runs | {"XLA": (plain, (x, scale, rstd, a))})
    config = float8_config.row_config(WIDTH)
    runs = {config: (lambda x, scale: normed.round_rows(x, scale, 1e-5, 0.0, config), (x, scale))}
    table("norm's rows", 3 * PASS // 2, runs)
    wide = normal(20, TOKENS, 2 * FEATURES), normal(21, 2 * FEATURES, RANK, scale=0.1)
    for name, (dy, b), parts in (
        ("gate and up", wide, (FEATURES, FEATURES)),
        ("residual", (operands.stream[0], operands.b), (WIDTH,)),
    ):
        absmax = jnp.max(jnp.abs(dy), axis=1).astype(jnp.float32)
        runs = {
            t: (lambda *args, t=t, parts=parts: rounded.round_rows(*args, parts, t), (dy, absmax, b))
            for t in grid(WIDE, (14, 28), (3, 4), Tiles)
        }
        apart = lambda dy, b, parts=parts: (dot(dy, block_matrix(b, parts), ((1,), (0,))), quantize_rows(dy))  # noqa: E731
        table(f"rounding, {name}", 3 * dy.size, runs | {"XLA": (apart, (dy, b))})
    dy, parts = jnp.concatenate(operands.dparts, axis=1), tuple(array.shape[1] for array in operands.dparts)
    absmax, b = jnp.max(jnp.abs(dy), axis=1).astype(jnp.float32), operands.out_b
    args = dy, operands.thins, b, absmax
    runs = {
        t: (lambda *args, t=t: low_rank.output_gradients(*args[:3], parts, args[3], t), args)
        for t in grid(WIDE, (16, 32), (3, 4), Tiles)
    }

    def each_alone(dy, products, b, absmax):
        return (
            dot(dy, block_matrix(b, parts), ((1,), (0,))),
            dot(dy, products, ((0,), (0,)), jnp.float32),
            quantize_rows(dy),
        )

    table("rounding, queries, keys and values", 3 * dy.size, runs | {"XLA": (each_alone, args)})


def rope(operands: Operands) -> None:
    """The way from the qkv projection to attention, and back."""
    moved = 2 * 2 * TOKENS * (HEADS[0] + 2 * HEADS[1]) * SIZE
    heads = ((64, 4, 4), (32, 4, 4), (16, 2, 4), (16, 4, 4), (16, 2, 2), (32, 2, 2), (16, 1, 2), (32, 2, 8), (64, 2, 8))
    args = operands.of_turn()
    runs: dict[Any, Run] = {
        t: (lambda *args, t=t: turn.forward(*args, HEADS, t), args) for t in grid(heads, (1, 2), (1, 2), HeadTiles)
    }
    table("rope forward", moved, runs | {"XLA": (lambda *args: plain_turn(*args, heads=HEADS), args)})
    args = operands.of_return()
    runs = {t: (lambda *args, t=t: by_kernel_return(*args, tiles=t), args) for t in grid(WIDE, (16,), (3, 4), Tiles)}
    table("rope backward", moved, runs | {"XLA": (plain_return, args)})


def table(name: str, moved: int, runs: dict[Any, Run]) -> None:
    """Time the compilable functions by turns, and print them by time."""
    named = {f"p{number}": key for number, key in enumerate(runs)}
    programs = [Program(short, *runs[key], 1) for short, key in named.items()]
    compiled = compile_all(programs)
    for short, result in compiled.items():
        if isinstance(result, Exception):
            say("out:", name, named[short], str(result).splitlines()[0][:90])
    good = {short: result for short, result in compiled.items() if not isinstance(result, Exception)}
    timings = measure([program for program in programs if program.name in good], 7, good)
    say(f"{name}: {len(good)} compiled, the bytes take {moved / 4.2e6:.1f} µs")
    ordered = sorted(timings.items(), key=lambda item: item[1].median)
    for place, (short, timing) in enumerate(ordered):
        if place < 8 or named[short] == "XLA":
            say(f"{timing.median * 1e6:9.1f} µs ({timing.best * 1e6:.1f}–{timing.worst * 1e6:.1f})", named[short])


if __name__ == "__main__":
    compat.silence_triton_deprecation()
    parts = {function.__name__: function for function in (add, outputs, inputs, norms, rounding, rope)}
    say(jax.devices()[0].device_kind, jax.__version__)
    chosen = sys.argv[1:] or ["check", *parts]
    if "check" in chosen:
        check()
    full = Operands(TOKENS, WIDTH, HEADS, SIZE)
    for one in [name for name in parts if name in chosen]:
        parts[one](full)
