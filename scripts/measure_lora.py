"""Check and time the parts of adapters on this machine's card: kernels, tiles, thin products, blocks.

    python scripts/measure_lora.py                        everything
    python scripts/measure_lora.py check tiles thin       only these parts

Every figure is the median over interleaved rounds, device time of the kernels; a part is printed when it is done.
"""

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastjax.bench import lora
from fastjax.bench.timing import Program, compile_all, measure
from pallas_kernels import dispatch
from pallas_kernels.float8 import Scaled
from pallas_kernels.glu.lora import Inner, config, triton, xla

START = time.time()
TOKENS, WIDTH, FEATURES = 8192, 4096, 14336
FORWARD = [
    config.Tiles(rows, columns, loop, warps, stages)
    for (rows, columns, warps), loop, stages in itertools.product(
        ((64, 64, 8), (64, 64, 4), (32, 64, 4), (32, 128, 4), (32, 128, 8), (16, 128, 4)), (16, 28), (1, 2, 3)
    )
]
BACKWARD = [
    config.Tiles(rows, columns, loop, warps, stages)
    for (rows, columns, warps), loop, stages in itertools.product(
        ((32, 64, 8), (32, 64, 4), (32, 32, 4), (16, 64, 4), (16, 128, 4), (16, 128, 8)), (32,), (1, 2, 3)
    )
]


def say(*words: Any) -> None:
    """Print at once, so that an interrupted run keeps its output."""
    print(f"{time.time() - START:6.1f}", *words, flush=True)


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Random bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * jnp.bfloat16(scale)


def operands(rank: int, tokens: int = TOKENS, features: int = FEATURES) -> tuple[jax.Array, ...]:
    """gate and up, thin, B, dh, A, dthin."""
    return (
        normal(0, tokens, 2 * features),
        normal(1, tokens, 2 * rank),
        normal(2, 2, features, rank, scale=0.1),
        normal(3, tokens, features),
        normal(4, rank, features, scale=0.1),
        normal(5, tokens, rank, scale=0.1),
    )


def distances(found: Any, expected: Any) -> str:
    """‖found - expected‖ / ‖expected‖ of each leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    wide = [(np.asarray(f, np.float64), np.asarray(e, np.float64)) for f, e in pairs]
    return " ".join(f"{np.linalg.norm(f - e) / np.linalg.norm(e):.2e}" for f, e in wide)


def check() -> None:
    """Kernels and whole blocks in bfloat16 against float32; the plain block's distances beside the unit's."""
    capability = dispatch.target().compute_capability or (9, 0)
    for rank in (16, 64):
        both, thin, b, dh, a, dthin = operands(rank, 512, 1024)
        wide = [array.astype(jnp.float32) for array in (both, thin, b, dh, a, dthin)]
        inner = Inner(wide[1], wide[2])
        exact = (
            *xla.forward(wide[0], inner, wide[4], "silu"),
            *xla.backward(wide[0], inner, wide[3], wide[4], wide[5], "silu"),
        )
        by_triton = (
            *triton.forward(both, thin, b, a, "silu", config.forward_config(capability, rank)),
            *triton.backward(both, thin, b, dh, a, dthin, "silu", config.backward_config(capability, rank)),
        )
        inner = Inner(thin, b)
        by_xla = (
            *xla.forward(both, inner, a, "silu"),
            *xla.backward(both, inner, dh, a, dthin, "silu"),
        )
        say(f"kernels r={rank} triton", distances(by_triton, exact))
        say(f"kernels r={rank} xla   ", distances(by_xla, exact))
    case = lora.LoraCase(tokens=(2, 512), shape=(512, 1024), ranks=(16,))
    for weight in case.weights:
        shapes = (2048, 512), (512, 1024)
        upper, lower = (lora.random_weight(weight, shape, jax.random.key(n)) for n, shape in enumerate(shapes))
        graphdef, trained, frozen = lora.build(case, (upper, lower), 16, jax.random.key(3))
        x, dy = normal(6, 2, 512, 512), normal(7, 2, 512, 512)

        def run(apply, dtype, graphdef=graphdef, trained=trained, frozen=frozen, x=x, dy=dy):
            function = lora.forward_and_backward(lambda t, f, x: apply(nnx.merge(graphdef, t, f), x))
            return jax.jit(function)(trained, frozen, x.astype(dtype), dy.astype(dtype))

        exact = run(lora.plain, jnp.float32)
        say(f"block {weight} unit ", distances(run(lambda block, x: block(x, None), jnp.bfloat16), exact))
        say(f"block {weight} plain", distances(run(lora.plain, jnp.bfloat16), exact))


def powers(seed: int, size: int) -> jax.Array:
    """Scales of products in float8."""
    return jnp.exp2(jax.random.randint(jax.random.key(seed), (size,), -3, 4).astype(jnp.float32))


def tiles() -> None:
    """Block sizes of both kernels, those of products in float8 with their scales, and a frozen block's passes.

    The backward kernel writes over gate and up, which are copied before it here.
    """
    capability = dispatch.target().compute_capability or (9, 0)
    for rank in (16, 64):
        both, thin, b, dh, a, dthin = operands(rank)
        forward = {
            ("forward", rank, t): (
                lambda *args, t=t: triton.forward(*args, "silu", t), (both, thin, b, a)
            ) for t in FORWARD
        }  # fmt: skip
        backward = {
            ("backward", rank, t): (
                lambda *args, t=t: triton.backward(*args, "silu", t), (both, thin, b, dh, a, dthin)
            ) for t in BACKWARD
        }  # fmt: skip
        sizes = config.forward_config(capability, rank), config.backward_config(capability, rank)
        scaled = Scaled(both, powers(6, TOKENS), powers(7, 2 * FEATURES))
        scaled_dh = Scaled(dh, powers(8, TOKENS), powers(9, FEATURES))
        in_float8 = {
            ("forward", rank, "products in float8", sizes[0]): (
                lambda *args, t=sizes[0]: triton.forward(*args, "silu", t), (scaled, thin, b, a)
            ),
            ("backward", rank, "products in float8", sizes[1]): (
                lambda *args, t=sizes[1]: triton.backward(*args, "silu", t), (scaled, thin, b, scaled_dh, a, dthin)
            ),
        }  # fmt: skip
        inner = Inner(thin, b)
        plain = {
            ("forward", rank, "XLA, with adapters"): (
                lambda both, inner, a: xla.forward(both, inner, a, "silu"), (both, inner, a)
            ),
            ("forward", 0, "XLA, frozen"): (lambda both: xla.forward(both, None, None, "silu"), (both,)),
            ("backward", rank, "XLA, with adapters"): (
                lambda both, inner, dh, a, dthin: xla.backward(both, inner, dh, a, dthin, "silu"),
                (both, inner, dh, a, dthin),
            ),
            ("backward", 0, "XLA, frozen"): (
                lambda both, dh: xla.backward(both, None, dh, None, None, "silu"), (both, dh)
            ),
        }  # fmt: skip
        table({**forward, **backward, **in_float8, **plain})


def thin() -> None:
    """The thin products around the kernels, as XLA chooses them."""
    x, gate_up = normal(0, TOKENS, WIDTH), normal(1, TOKENS, 2 * FEATURES)

    def dot(left, right, dims, dtype=None):
        return jax.lax.dot_general(left, right, (dims, ((), ())), preferred_element_type=dtype)

    found = {}
    for rank in (16, 32, 64, 128):
        down, narrow = normal(2, rank, WIDTH), normal(3, TOKENS, rank)
        block = normal(4, 2 * FEATURES, rank)
        found |= {
            ("x·Aᵀ", rank, "67 MB: 16 µs"): (lambda x, a: dot(x, a, ((1,), (1,))), (x, down)),
            ("thinᵀ·x", rank, "67 MB: 16 µs"): (lambda t, x: dot(t, x, ((0,), (0,)), jnp.float32), (narrow, x)),
            ("y + thin·B", rank, "201 MB: 48 µs"): (lambda y, t, b: y + dot(t, b, ((1,), (0,))), (x, narrow, down)),
            ("[dgate|dup]·B", rank, "470 MB: 112 µs"): (lambda d, b: dot(d, b, ((1,), (0,))), (gate_up, block)),
        }
    table(found)


def table(functions: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """Time the compilable functions by turns, and print them by time."""
    named = {f"p{number}": name for number, name in enumerate(functions)}
    programs = [
        Program(short, function, arguments, 1)
        for short, (function, arguments) in zip(named, functions.values(), strict=True)
    ]
    compiled = compile_all(programs)
    for short, result in compiled.items():
        if isinstance(result, Exception):
            say("out:", *named[short], str(result).splitlines()[0][:90])
    good = {short: result for short, result in compiled.items() if not isinstance(result, Exception)}
    say(f"{len(good)} compiled")
    timings = measure([program for program in programs if program.name in good], 7, good)
    for short, timing in sorted(timings.items(), key=lambda item: (str(named[item[0]][:2]), item[1].median)):
        say(f"{timing.median * 1e6:9.1f} µs ({timing.best * 1e6:.1f}–{timing.worst * 1e6:.1f})", *named[short])


def blocks() -> None:
    """`fastjax bench lora`."""
    lora.run()


if __name__ == "__main__":
    parts = {function.__name__: function for function in (check, blocks, tiles, thin)}
    say(jax.devices()[0].device_kind, jax.__version__)
    for chosen in sys.argv[1:] or parts:
        parts[chosen]()
