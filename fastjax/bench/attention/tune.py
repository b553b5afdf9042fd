"""The block sizes of the attention kernels, measured: every kernel, by head size and kind of mask, all candidates.

Each candidate is compiled and timed by turns with the others; one that cannot be compiled or run is passed over. A gain
of less than a hundredth does not count: the kernel's own guess then stays. Winners are kept in the cache of
`pallas_kernels.autotune` as soon as they are known, and may be written as the table to ship.
"""

import dataclasses
import datetime
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from fastjax.bench.attention.cases import Problem, chat_lengths, check_names, make_arrays, packed
from fastjax.bench.tables import Case, Row, measure, number, print_rows, word
from fastjax.errors import ConfigError
from pallas_kernels import autotune, dispatch
from pallas_kernels.attention import mosaic_sm90, triton
from pallas_kernels.attention.block_sizes import facts as facts_of
from pallas_kernels.attention.call import Call
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.mosaic_sm90 import config as mosaic_config
from pallas_kernels.attention.operands import Cotangents, Operands
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.triton import config as triton_config
from pallas_kernels.autotune import Kernel

KINDS = ("dense", "documents", "window", "cap")
IMPLEMENTATIONS = ("mosaic", "triton")
_GAIN = 0.99


@dataclasses.dataclass(frozen=True)
class TuneCase:
    """Settings of the measurement.

    Attributes:
        implementations: of `IMPLEMENTATIONS`.
        sizes: D and Dv.
        kinds: of `KINDS`.
        batch: rows.
        seq: tokens of a row.
        heads: query heads; half as many from a size of 192 on.
        kv_heads: key heads.
        dtype: of the arrays.
        rounds: runs; their median counts.
    """

    implementations: tuple[str, ...] = IMPLEMENTATIONS
    sizes: tuple[int, ...] = (64, 128, 256)
    kinds: tuple[str, ...] = KINDS
    batch: int = 4
    seq: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "bfloat16"
    rounds: int = 7


class Job(NamedTuple):
    """A kernel in a problem.

    Attributes:
        kernel: the kernel.
        facts: the case of the block sizes.
        candidates: block sizes, the guess first.
        run: of a candidate and the arguments.
    """

    kernel: Kernel
    facts: str
    candidates: Sequence[Any]
    run: Callable[..., Any]


def run(given: TuneCase | None = None, ship: Path | None = None, console: Console | None = None) -> dict[str, Any]:
    """Measure, show, keep.

    Args:
        given: the settings.
        ship: the file for the shipped table with this card's new entries in it; None: no file.
        console: for the tables.

    Returns:
        The fastest block sizes by kernel and facts.

    Raises:
        ConfigError: the device has none of these kernels.
        OSError: a file cannot be read or written.
        ValueError: the cache is some other file.
    """
    given, console = given or TuneCase(), console or Console()
    check_names("--implementations", given.implementations, IMPLEMENTATIONS)
    check_names("--kinds", given.kinds, KINDS)
    made = f"{datetime.date.today()}, jax {jax.__version__}, {' '.join(['fastjax', *sys.argv[1:]])}"
    found: dict[tuple[Kernel, str], Any] = {}
    for size in given.sizes:
        for kind in given.kinds:
            problem = _problem(given, size, kind)
            arguments = _arguments(problem, given.dtype)
            jobs = _jobs(given, problem, arguments)
            found |= fastest(jobs, arguments, given.rounds, console)
            if ship is not None and found:  # the results so far, in case the rest is cut off
                autotune.ship(ship, found, made)
    if not found:
        raise ConfigError(f"bench attention --autotune: {dispatch.target()} has none of {given.implementations}")
    console.print(f"kept in {autotune.cache_file()}", highlight=False)
    if ship is not None:
        console.print(f"written to {ship}", highlight=False)
    return {f"{kernel.name} {facts}": config for (kernel, facts), config in found.items()}


def fastest(
    jobs: Sequence[Job], arguments: tuple[Any, ...], rounds: int, console: Console
) -> dict[tuple[Kernel, str], Any]:
    """Time the candidates of jobs that have their arguments in common; keep the fastest.

    Args:
        jobs: the jobs.
        arguments: of their `run`, behind the candidate.
        rounds: runs; their median counts.
        console: for a table of each job.

    Returns:
        (kernel, facts) → block sizes, without jobs whose candidates all fail.
    """
    cases = [
        Case({"job": place, "index": index}, partial(job.run, config), arguments)
        for place, job in enumerate(jobs)
        for index, config in enumerate(job.candidates)
    ]
    rows = measure(cases, rounds, "microseconds")
    found: dict[tuple[Kernel, str], Any] = {}
    for place, job in enumerate(jobs):
        own = [row for row in rows if row["job"] == place]
        best = _winner([row["microseconds"] for row in own])
        _show(console, job, own, best)
        if best is not None:
            found[job.kernel, job.facts] = job.candidates[best]
            autotune.keep(job.kernel, job.facts, job.candidates[best])
    return found


def _winner(times: Sequence[float | None]) -> int | None:
    """The fastest, or the first where the fastest gains less than a hundredth; None where none runs."""
    ran = [index for index, value in enumerate(times) if value is not None]
    if not ran:
        return None
    best = min(ran, key=lambda index: times[index] or 0.0)
    guess = times[0]
    return 0 if guess is not None and (times[best] or 0.0) > _GAIN * guess else best


def _problem(given: TuneCase, size: int, kind: str) -> Problem:
    heads = given.heads // 2 if size >= 192 else given.heads
    lengths = chat_lengths(given.batch * given.seq, given.seq)
    return Problem(
        kind,
        given.batch,
        given.seq,
        heads,
        given.kv_heads,
        size,
        window=given.seq // 4 if kind == "window" else None,
        cap=50.0 if kind == "cap" else None,
        documents=packed(lengths, given.batch, given.seq) if kind == "documents" else None,
    )


def _arguments(problem: Problem, dtype: str) -> tuple[Any, ...]:
    """q, k, v, mask, and for the backward pass lse, delta and dout."""
    (arrays,) = make_arrays(problem, dtype)
    mask = Mask(arrays.get("ranges"), None, None, jnp.zeros(1, jnp.int32))
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    # Statistics that keep the weights finite; speed does not depend on them.
    lse = jnp.full((problem.batch, problem.heads, problem.length), np.log(problem.length), jnp.float32)
    return q, k, v, mask, lse, jnp.zeros_like(lse), dout


def _jobs(given: TuneCase, problem: Problem, arguments: tuple[Any, ...]) -> list[Job]:
    size, documents = problem.size, problem.documents is not None
    options = Options(size**-0.5, True, problem.window, problem.cap, 0.0, 0)
    about: dict[str, bool] = {"documents": documents, "grouped": problem.heads // problem.kv_heads % 2 == 0}
    facts = facts_of(given.dtype, size, size, options, **about)
    guess = triton_config.triton_config(size, size, options, dispatch.target().compute_capability)
    candidates = {
        "mosaic": [
            ("forward", mosaic_config.FORWARD, mosaic_config.forward_candidates(size, size, options, **about)),
            ("dq", mosaic_config.DQ, mosaic_config.dq_candidates(size, size, options, **about)),
            ("dkv", mosaic_config.DKV, mosaic_config.dkv_candidates(size, size, options)),
        ],
        "triton": [
            (part, kernel, triton_config.candidates(part, getattr(guess, part)))
            for part, kernel in triton_config.KERNELS.items()
        ],
    }
    (q, k, v), jobs = arguments[:3], []
    for name in given.implementations:
        module = mosaic_sm90 if name == "mosaic" else triton
        if module.why_not(Call(dispatch.target(), q, k, v, options, documents=documents)) is None:
            run = partial(_part, module, options, None if name == "mosaic" else guess)
            jobs += [Job(kernel, facts, configs, partial(run, part)) for part, kernel, configs in candidates[name]]
    return jobs


def _part(module: Any, options: Options, guess: Any, part: str, config: Any, *arguments: Any) -> Any:
    """A part of attention with a candidate; the compiler leaves out the backward kernel not asked for.

    Args:
        module: `mosaic_sm90` or `triton`.
        options: of the call.
        guess: Triton's block sizes of the other parts; None: each part of Mosaic has a setting of its own.
        part: "forward", "dq" or "dkv".
        config: the candidate.
        *arguments: as `_arguments`.
    """
    q, k, v, mask, lse, delta, dout = arguments
    if guess is None:
        settings = {"config" if part == "forward" else part: config}
    else:
        settings = {"config": dataclasses.replace(guess, **{part: config})}
    operands = Operands(q, k, v, mask, None, None)
    if part == "forward":
        return module.forward(operands, options, **settings)[0]
    found = module.backward(operands, Cotangents(lse, delta, dout, dout), options, **settings)
    return found[:1] if part == "dq" else found[1:3]


def _show(console: Console, job: Job, rows: list[Row], best: int | None) -> None:
    for row, config in zip(rows, job.candidates, strict=True):
        row["blocks"] = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())
        row["over"] = row["microseconds"] and rows[0]["microseconds"] and row["microseconds"] / rows[0]["microseconds"]
        row["kept"] = "kept" if row["index"] == best else ""
    numbers = {"µs": number("microseconds", ",.1f"), "over the guess": number("over", ".3f"), "": word("kept")}
    print_rows(console, f"{job.kernel.name} · {job.facts}", rows, {"": word("blocks")}, numbers)
