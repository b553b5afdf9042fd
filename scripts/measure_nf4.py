"""Check and time the products with NF4 weights on this machine's card, beside cuBLAS, many block sizes in one run.

    python scripts/measure_nf4.py                    everything
    python scripts/measure_nf4.py check few fused    only these parts

Times are medians over interleaved rounds, out of a cold cache; a line is printed as soon as it is known.
"""

import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.bench.timing import Program, compile_all, measure
from pallas_kernels import nf4
from pallas_kernels.nf4 import mosaic_sm90
from pallas_kernels.nf4.config import MatmulRsConfig, MatmulSsConfig, MatvecConfig, matmul_ss_config, matvec_config

SHAPES = ((14336, 4096), (4096, 14336))
COLD_BYTES = 256 * 2**20
START = time.perf_counter()

FEW = [
    MatvecConfig(warpgroups, row_tiles, stages, ahead)
    for warpgroups, row_tiles, stages, ahead in (
        (1, 1, 2, 1),
        (2, 1, 2, 1),
        (4, 1, 2, 1),
        (7, 1, 2, 1),
        (1, 1, 2, 2),
        (2, 1, 2, 2),
        (4, 1, 2, 2),
        (1, 1, 3, 3),
        (2, 1, 3, 3),
        (1, 2, 2, 1),
        (2, 2, 2, 1),
        (4, 2, 2, 1),
        (2, 2, 2, 2),
    )
]
SMALL = matmul_ss_config(64, 4096, mosaic_sm90.CORES)
MIDDLE = matmul_ss_config(128, 4096, mosaic_sm90.CORES)
LARGE = MatmulSsConfig()
FUSED = {
    16: [SMALL],
    64: [SMALL, dataclasses.replace(SMALL, ahead=4), dataclasses.replace(SMALL, ahead=1)],
    128: [SMALL, MIDDLE, dataclasses.replace(MIDDLE, ahead=4)],
    256: [MIDDLE, LARGE, dataclasses.replace(LARGE, splits=1)],
    512: [
        LARGE,
        dataclasses.replace(LARGE, splits=1),
        dataclasses.replace(LARGE, ahead=1),
        dataclasses.replace(LARGE, ahead=3),
        dataclasses.replace(LARGE, x_stages=3, w_stages=4),
        dataclasses.replace(LARGE, x_stages=4, w_stages=2),
        MIDDLE,
        dataclasses.replace(MIDDLE, splits=1),
    ],
    1024: [LARGE, dataclasses.replace(LARGE, splits=1)],
    2048: [LARGE],
}
WIDE = MatmulRsConfig()
NARROW = MatmulRsConfig(rows=128)
REGISTERS = {
    (512, False): [
        WIDE,
        dataclasses.replace(WIDE, splits=2),
        dataclasses.replace(WIDE, cluster=1),
        dataclasses.replace(WIDE, x_stages=5, w_stages=2),
        LARGE,
    ],
    (512, True): [WIDE, *(dataclasses.replace(WIDE, cluster=1, splits=splits) for splits in (None, 2)), LARGE],
    (1024, False): [WIDE, dataclasses.replace(WIDE, splits=1)],
    (1024, True): [dataclasses.replace(WIDE, cluster=1, splits=splits) for splits in (None, 1)],
    (2048, False): [dataclasses.replace(WIDE, splits=1)],
    (2048, True): [dataclasses.replace(WIDE, cluster=1, splits=1)],
    (256, False): [WIDE, dataclasses.replace(WIDE, splits=1), NARROW],
    (256, True): [dataclasses.replace(WIDE, cluster=1, splits=splits) for splits in (None, 1)],
    (128, False): [NARROW, dataclasses.replace(NARROW, splits=1), dataclasses.replace(NARROW, splits=4), MIDDLE],
    (128, True): [*(dataclasses.replace(NARROW, cluster=1, splits=splits) for splits in (None, 1, 4)), MIDDLE],
    (64, False): [MatmulRsConfig(rows=64), MatmulRsConfig(rows=64, splits=1), SMALL],
    (64, True): [MatmulRsConfig(rows=64, cluster=1), MatmulRsConfig(rows=64, cluster=1, splits=1), SMALL],
}


def say(*words: Any) -> None:
    print(f"{time.perf_counter() - START:6.1f}", *words, flush=True)


def matvec(x, codes, absmax, *, gradient: bool, config: MatvecConfig):
    """The kernel for few rows, forward only."""
    assert not gradient
    return mosaic_sm90.matvec(x, codes, absmax, config=config)


def matmul_ss(x, codes, absmax, *, gradient: bool, config: MatmulSsConfig):
    """The kernel with decoded weights in shared memory."""
    cores = jax.devices()[0].core_count
    return mosaic_sm90.matmul_ss(x, codes, absmax, gradient=gradient, config=config, cores=cores)


def matmul_rs(x, codes, absmax, *, gradient: bool, config: MatmulRsConfig):
    """The kernel with decoded weights in registers."""
    return mosaic_sm90.matmul_rs(x, codes, absmax, gradient=gradient, config=config, cores=jax.devices()[0].core_count)


@functools.partial(jax.jit, static_argnames="gradient")
def separate(x, codes, absmax, *, gradient: bool):
    """Decoding to memory, then the product."""
    absmax, x = jax.lax.optimization_barrier((absmax, x))
    weight = nf4.dequantize(codes, absmax, shape=(codes.shape[0], 2 * codes.shape[1]), dtype=x.dtype)
    return dense(x, jax.lax.optimization_barrier(weight), gradient=gradient)


def dense(x, weight, *, gradient: bool):
    """The product with a weight in 16 bits."""
    return jax.lax.dot_general(x, weight, (((1,), (0 if gradient else 1,)), ((), ())))


def each(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function of x and each of `count` weights."""

    def run(x, *weights):
        size = len(weights) // count
        return [function(x, *weights[size * index : size * (index + 1)]) for index in range(count)]

    return run


KERNELS = {MatvecConfig: matvec, MatmulSsConfig: matmul_ss, MatmulRsConfig: matmul_rs}


def name(config: Any) -> str:
    """Block sizes in a line."""
    return (
        KERNELS[type(config)].__name__
        + " "
        + " ".join(f"{key}={value}" for key, value in dataclasses.asdict(config).items())
    )


def compiled_or_not(programs: Sequence[Program]) -> tuple[dict[str, Callable[..., Any]], dict[str, Exception]]:
    """Compiled programs, and the errors of the others."""
    results = compile_all(programs)
    compiled = {name: result for name, result in results.items() if not isinstance(result, Exception)}
    return compiled, {name: result for name, result in results.items() if isinstance(result, Exception)}


@functools.cache
def weights(shape: tuple[int, int]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Weights larger than the cache: codes and scales by turns, and the decoded matrices."""

    @jax.jit
    def draw(key):
        first, second = jax.random.split(key)
        codes = jax.random.bits(first, (shape[0], shape[1] // 2), jnp.uint8)
        return codes, jax.random.uniform(second, (shape[0], shape[1] // 64), jnp.float32, 0.01, 0.1)

    packed = [draw(key) for key in jax.random.split(jax.random.key(0), -(-COLD_BYTES // (math.prod(shape) // 2)))]
    decode = jax.jit(functools.partial(nf4.dequantize, shape=shape, dtype=jnp.bfloat16))
    return [array for pair in packed for array in pair], [decode(*pair) for pair in packed]


def time_all(shape: tuple[int, int], tokens: int, gradient: bool, configs: Sequence[Any]) -> None:
    """cuBLAS, decoding first, and the kernels with each of the block sizes."""
    packed, decoded = weights(shape)
    count = len(decoded)
    x = jax.random.normal(jax.random.key(1), (tokens, shape[0 if gradient else 1]), jnp.bfloat16)
    jobs: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("cuBLAS", functools.partial(dense, gradient=gradient), (x, *decoded)),
        ("decode, cuBLAS", functools.partial(separate, gradient=gradient), (x, *packed)),
    ]
    for config in configs:
        call = functools.partial(KERNELS[type(config)], gradient=gradient, config=config)
        jobs.append((name(config), call, (x, *packed)))
    programs = [
        Program(f"p{number}", each(call, count), arguments, count) for number, (_, call, arguments) in enumerate(jobs)
    ]
    compiled, failed = compiled_or_not(programs)
    timings = measure([program for program in programs if program.name in compiled], 7, compiled)
    say(f"== {shape[0]}×{shape[1]} {tokens} tokens {'dX' if gradient else 'forward'} ({timings['p0'].source})")
    for program, (title, _, _) in zip(programs, jobs, strict=True):
        if program.name in failed:
            say(f"  {title:110s} failed: {' '.join(str(failed[program.name]).split())[:120]}")
            continue
        timing = timings[program.name]
        rate = 2 * tokens * math.prod(shape) / timing.median / 1e12
        spread = f"{timing.best * 1e6:.1f}–{timing.worst * 1e6:.1f}"
        ratio = timings["p0"].median / timing.median
        say(f"  {title:110s} {timing.median * 1e6:8.1f} µs {spread:>16s} {rate:6.1f} TFLOP/s {ratio:5.2f} of cuBLAS")


Case = tuple[int, tuple[int, int], bool, Any]
CHECKS: list[Case] = [
    *((tokens, (704, 1536), False, MatvecConfig(2)) for tokens in (1, 3, 8, 9, 17, 32)),
    *((tokens, (1056, 4096), False, config) for tokens in (1, 16) for config in FEW),
    *(
        (tokens, (704, 1536), gradient, matmul_ss_config(tokens, 704, mosaic_sm90.CORES))
        for tokens in (1, 65, 100, 257)
        for gradient in (False, True)
    ),
    *(
        (tokens, (1088, 4096), gradient, dataclasses.replace(config, splits=splits))
        for (tokens, config), gradient, splits in itertools.product(
            ((64, SMALL), (128, MIDDLE), (512, LARGE), (513, LARGE)), (False, True), (None, 1)
        )
    ),
    *((512, shape, gradient, LARGE) for shape in SHAPES for gradient in (False, True)),
]


REGISTERS_CHECKS: list[Case] = [
    *((tokens, (768, 1536), gradient, WIDE) for tokens in (1, 257) for gradient in (False, True)),
    *((513, (704, 1536), False, dataclasses.replace(WIDE, cluster=cluster)) for cluster in (1, 2)),
    *((100, (768, 1536), gradient, NARROW) for gradient in (False, True)),
    *((513, (1088, 4096), False, dataclasses.replace(WIDE, splits=splits)) for splits in (None, 1, 2)),
    (513, (1088, 4096), False, dataclasses.replace(WIDE, x_stages=5, w_stages=2)),
    *((513, (1152, 4096), True, dataclasses.replace(WIDE, cluster=cluster)) for cluster in (1, 2)),
    *((512, shape, gradient, WIDE) for shape in SHAPES[1:] for gradient in (False, True)),
]


@functools.cache
def matrix(shape: tuple[int, int]) -> tuple[jax.Array, jax.Array, jax.Array, np.ndarray]:
    """Fresh normal values, quantised: codes, scales, the decoded matrix, and that in float32 on the host."""
    codes, absmax = jax.jit(nf4.quantize)(np.random.default_rng().standard_normal(shape, np.float32))
    codes = nf4.reorder(codes, "bitsandbytes", "split").reshape(shape[0], shape[1] // 2)
    absmax = absmax.reshape(shape[0], shape[1] // 64)
    weight = nf4.dequantize(codes, absmax, shape=shape, dtype=jnp.bfloat16)
    return codes, absmax, weight, np.asarray(weight.astype(jnp.float32))


def check(cases: Sequence[Case] = CHECKS) -> None:
    """Largest errors of the kernel and of the separate product against float64 sums; decoded values to the bit."""

    def program(case):
        tokens, shape, gradient, config = case
        call = functools.partial(KERNELS[type(config)], gradient=gradient, config=config)
        arguments = (
            jnp.zeros((tokens, shape[0 if gradient else 1]), jnp.bfloat16),
            jnp.zeros((shape[0], shape[1] // 2), jnp.uint8),
            jnp.zeros((shape[0], shape[1] // 64), jnp.float32),
        )
        return Program(f"c{cases.index(case)}", call, arguments, 1)

    compiled, failed = compiled_or_not([program(case) for case in cases])
    say(f"== check: {len(compiled)} compiled")
    for number, (tokens, shape, gradient, config) in enumerate(cases):
        title = f"{tokens:5d} {shape[0]}×{shape[1]} {'dX     ' if gradient else 'forward'} {name(config)}"
        if f"c{number}" in failed:
            say(f"{title} failed: {' '.join(str(failed[f'c{number}']).split())[:140]}")
            continue
        run = compiled[f"c{number}"]
        codes, absmax, weight, wide = matrix(shape)
        rng, summed = np.random.default_rng(), shape[0 if gradient else 1]
        x = jnp.asarray(rng.standard_normal((tokens, summed), np.float32), jnp.bfloat16)
        # Float32 sums of exact products in pieces, added in float64: far more exact than the kernels.
        left, right = np.asarray(x, np.float32), wide if gradient else wide.T
        wanted = np.zeros((tokens, right.shape[1]))
        for first in range(0, summed, 64):
            wanted += left[:, first : first + 64] @ right[first : first + 64]
        jax.block_until_ready([jnp.full(wanted.shape, jnp.nan, jnp.bfloat16) for _ in range(2)])
        found, again = (np.asarray(run(x, codes, absmax), np.float64) for _ in range(2))
        other = np.asarray(separate(x, codes, absmax, gradient=gradient), np.float64)
        scale = np.abs(wanted).max()
        chosen = rng.integers(0, summed, tokens)
        picked = run(jax.nn.one_hot(chosen, summed, dtype=jnp.bfloat16), codes, absmax)
        exact = bool(jnp.all(picked == (weight[chosen] if gradient else weight[:, chosen].T)))
        errors = [f"{np.abs(result - wanted).max() / scale:.1e}" for result in (found, other)]
        means = [f"{np.abs(result - wanted).mean() / scale:.2e}" for result in (found, other)]
        repeats = "repeats" if (found == again).all() else "DIFFERS between runs"
        say(title, "max", *errors, "mean", *means, "exact weights" if exact else "WRONG WEIGHTS", repeats)


def few() -> None:
    """One to 32 tokens, with plausible block sizes."""
    for shape, tokens in itertools.product(SHAPES, (1, 4, 16, 32)):
        configs = FEW if tokens in (1, 16) else [matvec_config(tokens, shape), FEW[5], FEW[10]]
        time_all(shape, tokens, False, [*configs, *FUSED.get(tokens, [SMALL])])


def fused() -> None:
    """`matmul_ss` beside cuBLAS and decoding first, forward and dX."""
    for tokens in (512, 64, 2048, 16, 128, 256, 1024):
        shapes = SHAPES if tokens in (512, 64, 2048, 16) else SHAPES[1:]
        for shape, gradient in itertools.product(shapes, (True,) if tokens == 16 else (False, True)):
            time_all(shape, tokens, gradient, FUSED[tokens])


def registers(gradient: bool) -> None:
    """`matmul_rs`: errors, then times, the most important sizes first."""
    check([case for case in REGISTERS_CHECKS if case[2] == gradient])
    for (tokens, backward), configs in REGISTERS.items():
        if backward == gradient:
            for shape in SHAPES:
                time_all(shape, tokens, gradient, configs)


PARTS = {
    "check": check,
    "few": few,
    "fused": fused,
    "registers": functools.partial(registers, False),
    "registers_gradient": functools.partial(registers, True),
}

if __name__ == "__main__":
    say(jax.devices(), jax.__version__)
    for chosen in sys.argv[1:] or PARTS:
        PARTS[chosen]()
