"""Check and time the attention kernels on the card that is there, beside cuDNN, many block sizes in one run.

    python scripts/measure_attention.py                      everything
    python scripts/measure_attention.py check dense packed   only these parts

Every figure is the median over interleaved rounds; a line is printed as soon as it is known.
"""

import concurrent.futures
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import attention, mosaic_sm90, reference, segment_ranges
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.mosaic_sm90.config import DkvConfig, DqConfig, ForwardConfig
from pallas_kernels.attention.options import Options

HEADS, KEY_HEADS = 32, 8
IMPLEMENTATIONS = ("mosaic", "cudnn", "triton")
START = time.time()

#: name, (batch, length, heads, key heads, D, Dv), options
CHECKS: tuple[tuple[str, tuple[int, int, int, int, int, int], dict[str, Any]], ...] = (
    ("plain", (2, 512, 4, 2, 128, 128), {}),
    ("odd length", (1, 700, 4, 1, 64, 64), {}),
    ("D=80", (1, 300, 2, 1, 80, 80), {}),
    ("D=192, Dv=128", (1, 512, 2, 1, 192, 128), {}),
    ("D=256", (1, 512, 2, 1, 256, 256), {}),
    ("window", (1, 1024, 2, 1, 128, 128), {"sliding_window": 200}),
    ("cap", (1, 512, 2, 1, 128, 128), {"logits_soft_cap": 2.0}),
    ("dropout", (1, 512, 2, 1, 128, 128), {"dropout_rate": 0.2, "dropout_key": jax.random.key(7)}),
)


def say(*words: Any) -> None:
    """Print at once, so that a run that is cut off has said what it knew."""
    print(f"{time.time() - START:6.1f}", *words, flush=True)


@functools.partial(jax.jit, static_argnums=tuple(range(6)))
def arrays(batch: int, length: int, heads: int, key_heads: int, size: int, value_size: int) -> list[jax.Array]:
    """Random q, k, v and cotangent in bfloat16."""
    shapes = ((heads, size), (key_heads, size), (key_heads, value_size), (heads, value_size))
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (batch, length, *shape), jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]


def both(function: Callable[..., Any]) -> Callable[..., tuple[jax.Array, ...]]:
    """Forward and backward pass of a function of q, k, v and more."""

    def run(q, k, v, dout, *rest):
        out, vjp = jax.vjp(lambda q, k, v: function(q, k, v, *rest), q, k, v)
        return out, *vjp(dout)

    return run


def check() -> None:
    """Relative Frobenius errors of output and gradients against float32, and whether a repetition is bit-equal."""
    cases = [(case, implementation) for case in CHECKS for implementation in IMPLEMENTATIONS]

    def compiled(case):
        (_, shape, options), implementation = case
        run = jax.jit(both(functools.partial(attention, implementation=implementation, **options)))
        try:
            return run.lower(*arrays(*shape)).compile()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        programs = list(pool.map(compiled, cases))
    say(f"== check: {len(cases)} compiled")
    for ((name, shape, options), implementation), run in zip(cases, programs, strict=True):
        if isinstance(run, Exception):
            say(f"{name:16s} {implementation:8s} not served: {' '.join(str(run).split())[:140]}")
            continue
        given = arrays(*shape)
        wanted = jax.jit(both(functools.partial(reference.attention, **options)))(
            *(a.astype(jnp.float32) for a in given)
        )
        found, again = run(*given), run(*given)
        errors = [
            float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
            for a, b in zip(found, wanted, strict=True)
        ]
        equal = all(bool(jnp.all(a == b)) for a, b in zip(found, again, strict=True))
        say(f"{name:16s} {implementation:8s}", *(f"{error:.1e}" for error in errors), "repeats" if equal else "")


def measure(title: str, jobs: list[tuple[str, Callable[..., Any], tuple[Any, ...], float]]) -> None:
    """Compile jobs (name, function, arguments, operations) side by side, then time them in turns."""

    def compiled(job):
        try:
            return jax.jit(job[1]).lower(*job[2]).compile()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        programs = list(pool.map(compiled, jobs))
    say(f"== {title}: {len(jobs)} compiled")
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(4):
        for job, program, found in zip(jobs, programs, times, strict=True):
            if not isinstance(program, Exception):
                jax.block_until_ready(program(*job[2]))
                start = time.perf_counter()
                results = [program(*job[2]) for _ in range(6)]
                jax.block_until_ready(results)
                found.append((time.perf_counter() - start) / 6 * 1e3)
    for job, program, found in zip(jobs, programs, times, strict=True):
        if isinstance(program, Exception):
            say(f"{job[0]:60s} failed: {' '.join(str(program).split())[:140]}")
        else:
            say(f"{job[0]:60s} {np.median(found):8.3f} ms {job[3] / np.median(found) / 1e9:6.0f} TFLOP/s")


def named(name: str, operations: float, given: list[jax.Array], *rest: Any, **options: Any) -> list[Any]:
    """Jobs of every implementation, forward and with backward."""
    jobs = []
    for implementation in IMPLEMENTATIONS:

        def call(q, k, v, *ranges, implementation=implementation):
            extra = {"segment_ranges": ranges[0]} if ranges else {}
            return attention(q, k, v, implementation=implementation, **extra, **options)

        jobs.append((f"{name} {implementation} forward", call, (*given[:3], *rest), operations))
        jobs.append((f"{name} {implementation} both", both(call), (*given, *rest), 3.5 * operations))
    return jobs


def forward_alone(config: ForwardConfig, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """The Hopper forward kernel with given block sizes, causal."""
    mask = Mask(None, None, None, jnp.zeros(1, jnp.int32))
    return mosaic_sm90.forward(q, k, v, mask, None, None, Options(q.shape[3] ** -0.5, query_offset=0), config=config)


def gradients_alone(wanted: Any, configs: dict[str, Any], q, k, v, dout, statistics) -> Any:
    """One of the Hopper backward kernels; the other is compiled away."""
    mask, chosen = Mask(None, None, None, jnp.zeros(1, jnp.int32)), Options(q.shape[3] ** -0.5, query_offset=0)
    found = mosaic_sm90.backward(q, k, v, mask, None, None, statistics, statistics, dout, chosen, **configs)
    return found[wanted]


def dense() -> None:
    """Causal rows of 4,096 and 8,192, with the block sizes that are worth a try."""
    for length in (4096, 8192):
        given = arrays(4, length, HEADS, KEY_HEADS, 128, 128)
        operations = 2 * 2 * 4 * HEADS * length * length * 128 / 2
        jobs = named(f"4x{length}", operations, given)
        statistics = jnp.ones((4, HEADS, length))
        for config in (
            ForwardConfig(),
            ForwardConfig(pingpong=False),
            ForwardConfig(overlap=False),
            ForwardConfig(overlap=False, pingpong=False),
            ForwardConfig(block_kv=64, stages=4),
        ):
            jobs.append((str(config), functools.partial(forward_alone, config), tuple(given[:3]), operations))
        for dq in (DqConfig(), DqConfig(lag=True), DqConfig(64, 4), DqConfig(64, 4, True)):
            run = functools.partial(gradients_alone, 0, {"dq": dq})
            jobs.append((str(dq), run, (*given, statistics), 1.5 * operations))
        for dkv in (DkvConfig(stages=2), DkvConfig(stages=3), DkvConfig(stages=4), DkvConfig(32, 6)):
            run = functools.partial(gradients_alone, slice(1, 3), {"dkv": dkv})
            jobs.append((str(dkv), run, (*given, statistics), 2 * operations))
        measure(f"4x{length}", jobs)


def packed() -> None:
    """Eight equal documents in 4x4,096, and documents of a hundred tokens or so in 4x8,192."""
    rng = np.random.default_rng(0)
    short = np.stack([np.repeat(np.arange(1, 8193), rng.integers(40, 300, 8192))[:8192] for _ in range(4)])
    for name, ids in (("8 documents", np.repeat(np.arange(1, 9), 512)[None].repeat(4, 0)), ("short", short)):
        ids = np.asarray(ids, np.int32)
        seen = sum((np.bincount(row)[1:].astype(float) ** 2).sum() for row in ids) / 2
        ranges = segment_ranges(jnp.asarray(ids), max_documents=int(ids.max()))
        given = arrays(*ids.shape, HEADS, KEY_HEADS, 128, 128)
        measure(name, named(name, 2 * 2 * HEADS * 128 * seen, given, ranges))


def options() -> None:
    """Window, cap, sinks; heads of 64 and 256."""
    given = arrays(4, 8192, HEADS, KEY_HEADS, 128, 128)
    operations = 2 * 2 * 4 * HEADS * 8192 * 8192 * 128 / 2
    jobs = named("window 1024", operations * (1 - (1 - 1024 / 8192) ** 2), given, sliding_window=1024)
    jobs += named("cap 50", operations, given, logits_soft_cap=50.0)
    jobs += named("sinks", operations, given, sinks=jnp.zeros(HEADS))
    measure("options", jobs)
    for size, heads in ((64, 32), (256, 16)):
        given = arrays(4, 4096, heads, 8, size, size)
        measure(f"D={size}", named(f"D={size}", 2 * 2 * 4 * heads * 4096 * 4096 * size / 2, given))


PARTS = {part.__name__: part for part in (check, dense, packed, options)}

if __name__ == "__main__":
    say(jax.devices())
    for chosen in sys.argv[1:] or PARTS:
        PARTS[chosen]()
