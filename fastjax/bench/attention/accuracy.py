"""Accuracy of attention: the output and the gradients of q, k and v, beside the plain formula in float64.

The error of an array is ‖found − exact‖ / ‖exact‖ (Frobenius). It is compared with cuDNN's in the same call, or, where
cuDNN cannot serve it, with XLA's in the same 16 bits: 1.2 times as much is the bar. An array that is zero but for
rounding (the gradient of a query that sees one key) is held to the rounding of the dtype instead. Rows of nothing but
padding must give zeros, and nothing may be NaN or infinite. The exact results are computed on the device, in float64.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

from fastjax.bench.attention.cases import check_names
from fastjax.bench.attention.contenders import why
from fastjax.bench.results import make_table, save, show
from pallas_kernels import dispatch
from pallas_kernels.attention import attention, reference, segment_ranges

ARRAYS = ("out", "dq", "dk", "dv")
IMPLEMENTATIONS = ("mosaic", "cudnn", "triton", "xla")
BAR = 1.2
_WORKERS = 12


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call; by default one row of four query heads over two key heads.

    Attributes:
        length: S.
        keys: T; None: S.
        size: D.
        value_size: Dv; None: D.
        batch: B.
        documents: the lengths of each row's documents, the rest being padding.
        options: of `attention`.
        sinks: whether each head has one.
    """

    length: int = 256
    keys: int | None = None
    size: int = 128
    value_size: int | None = None
    batch: int = 1
    documents: tuple[tuple[int, ...], ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False


SHAPES: dict[str, Shape] = {
    **{f"D={size}": Shape(256, size=size) for size in (64, 80, 96, 112, 128, 192, 256)},
    "D=192 Dv=128": Shape(256, size=192, value_size=128),
    "D=64 Dv=128": Shape(256, size=64, value_size=128),
    "length 1": Shape(1),
    "length 333": Shape(333),
    "length 700": Shape(700),
    "length 1024": Shape(1024),
    "not causal": Shape(512, options=(("causal", False),)),
    "documents": Shape(
        512, batch=3, documents=((100, 1, 37, 1, 1, 128, 64, 150), (300, 212), ()), size=64
    ),
    "window": Shape(700, options=(("sliding_window", 100),)),
    "window, documents": Shape(
        512, batch=2, documents=((1, 300, 150), ()), options=(("sliding_window", 64),)
    ),
    "cap": Shape(512, options=(("logits_soft_cap", 5.0),)),
    "sinks": Shape(512, sinks=True),
    "cap, sinks, window": Shape(
        512, options=(("logits_soft_cap", 5.0), ("sliding_window", 130)), sinks=True, size=64
    ),
    "S=200 T=700": Shape(200, 700),
    "S=333 T=512 offset 64": Shape(333, 512, options=(("query_offset", 64),)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AccuracyResult:
    """One line of the table; `reason` alone is set where the implementation cannot serve the shape.

    Attributes:
        shape: its name.
        implementation: its name.
        errors: of `ARRAYS`, relative; of those that are zero but for rounding, the root mean square.
        ratios: these over cuDNN's, or XLA's; None for those that are zero but for rounding.
        beside: the implementation of the reference errors.
        faults: above the bar, not finite, not zero where all is padding.
        reason: why there is no error.
    """

    shape: str
    implementation: str
    errors: tuple[float, ...] = ()
    ratios: tuple[float | None, ...] = ()
    beside: str = ""
    faults: tuple[str, ...] = ()
    reason: str | None = None


def run(
    implementations: Sequence[str] = IMPLEMENTATIONS,
    shapes: Sequence[str] = tuple(SHAPES),
    dtype: str = "bfloat16",
    output: Path | None = None,
    console: Console | None = None,
) -> list[AccuracyResult]:
    """Compute, compare, show a table, write a file.

    Args:
        implementations: of `IMPLEMENTATIONS`.
        shapes: of `SHAPES`.
        dtype: bfloat16 or float16.
        output: JSON file for the device and the results; None: no file.
        console: for the table.

    Returns:
        The lines of the table.

    Raises:
        ConfigError: an unknown name.
        OSError: the file cannot be written.
    """
    console = console or Console()
    check_names("--implementations", implementations, IMPLEMENTATIONS)
    check_names("--shapes", shapes, tuple(SHAPES))
    # the others are compared with cuDNN and XLA
    wanted = tuple(dict.fromkeys((*implementations, "cudnn", "xla")))
    jobs = [(name, who) for name in shapes for who in ("exact", *wanted)]
    inputs = {name: _inputs(SHAPES[name], dtype) for name in shapes}

    def attempt(job: tuple[str, str]) -> Callable[..., Any] | Exception:
        name, who = job
        try:
            return _compiled(SHAPES[name], who, inputs[name])
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        compiled = dict(zip(jobs, pool.map(attempt, jobs), strict=True))
    results: list[AccuracyResult] = []
    for name in shapes:
        found = {who: _results(compiled[name, who], inputs[name], exact=who == "exact") for who in ("exact", *wanted)}
        results += _lines(name, SHAPES[name], found, implementations, dtype)
    _show(console, results, dtype)
    worst = [line for line in results if line.faults]
    console.print(
        f"{len(worst)} of {len(results)} lines at fault" if worst else f"all within {BAR} times", highlight=False
    )
    save(output, results, console, dtype=dtype, bar=BAR)
    return results


def _inputs(shape: Shape, dtype: str) -> dict[str, Any]:
    """q, k, v, dout, and where there are documents or sinks, ids, ranges and sinks."""
    rng = np.random.default_rng(0)
    keys, value_size = shape.keys or shape.length, shape.value_size or shape.size
    sizes = {
        "q": (shape.batch, shape.length, 4, shape.size),
        "k": (shape.batch, keys, 2, shape.size),
        "v": (shape.batch, keys, 2, value_size),
        "dout": (shape.batch, shape.length, 4, value_size),
    }
    arrays: dict[str, Any] = {name: jnp.asarray(rng.standard_normal(size), dtype) for name, size in sizes.items()}
    if shape.documents is not None:
        arrays["ids"] = jnp.asarray(_ids(shape))
        most = max(map(len, shape.documents))
        arrays["ranges"] = jax.jit(partial(segment_ranges, max_documents=most))(arrays["ids"])
    if shape.sinks:
        arrays["sinks"] = jnp.asarray(rng.standard_normal(4), jnp.float32)
    return arrays


def _ids(shape: Shape) -> np.ndarray:
    ids = np.zeros((shape.batch, shape.length), np.int32)
    for row, lengths in zip(ids, shape.documents or (), strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids


def _compiled(shape: Shape, who: str, arrays: dict[str, Any]) -> Callable[..., Any]:
    """Output and gradients, by an implementation or exactly."""
    options = dict(shape.options)

    def both(arrays: dict[str, Any]) -> tuple[Array, ...]:
        def attend(q, k, v) -> Any:
            if who == "exact":
                return reference.attention(q, k, v, segment_ids=arrays.get("ids"), sinks=arrays.get("sinks"), **options)
            return attention(
                q,
                k,
                v,
                segment_ranges=arrays.get("ranges"),
                sinks=arrays.get("sinks"),
                implementation=who,
                **options,
            )

        out, vjp = jax.vjp(attend, arrays["q"], arrays["k"], arrays["v"])
        return out, *vjp(arrays["dout"])

    if who == "exact":
        with jax.enable_x64(True):
            return jax.jit(both).lower(jax.tree.map(_widened_shape, arrays)).compile()
    return jax.jit(both).lower(arrays).compile()


def _widened_shape(leaf: Array) -> jax.ShapeDtypeStruct:
    """float64 for the numbers; sinks stay float32, which holds them exactly."""
    return jax.ShapeDtypeStruct(leaf.shape, _wide(leaf))


def _wide(leaf: Array) -> Any:
    return jnp.float64 if leaf.dtype in (jnp.bfloat16, jnp.float16) else leaf.dtype


def _results(function: Any, arrays: dict[str, Any], *, exact: bool) -> list[np.ndarray] | Exception:
    if isinstance(function, Exception):
        return function
    try:
        if exact:
            with jax.enable_x64(True):
                wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), _wide(leaf)), arrays)
                return [np.asarray(leaf, np.float64) for leaf in function(wide)]
        return [np.asarray(leaf, np.float64) for leaf in function(arrays)]
    except jax.errors.JaxRuntimeError as error:
        return error


def _lines(
    name: str, shape: Shape, found: dict[str, Any], implementations: Sequence[str], dtype: str
) -> list[AccuracyResult]:
    exact = found["exact"]
    if isinstance(exact, Exception):
        raise exact
    beside = "xla" if isinstance(found["cudnn"], Exception) else "cudnn"
    baseline = found[beside]
    if isinstance(baseline, Exception):
        raise baseline
    rounding = float(jnp.finfo(dtype).eps) / 2
    lines = []
    for who in implementations:
        results = found[who]
        if isinstance(results, Exception):
            lines.append(AccuracyResult(name, who, reason=why(results)))
            continue
        errors, ratios, faults = [], [], []
        for array, ours, theirs, wanted in zip(ARRAYS, results, baseline, exact, strict=True):
            error, zero = _error(ours, wanted)
            errors.append(error)
            # what the other has exactly right need not be right to more than a tenth of a rounding
            ratios.append(None if zero else error / max(_error(theirs, wanted)[0], rounding / 10))
            if not np.all(np.isfinite(ours)):
                faults.append(f"{array} is not finite")
            elif (error > rounding) if zero else (ratios[-1] > BAR):
                faults.append(f"{array} is above the bar")
            if shape.documents is not None and np.any(ours[_ids(shape) == 0]):
                faults.append(f"{array} of padding is not zero")
        lines.append(AccuracyResult(name, who, tuple(errors), tuple(ratios), beside, tuple(faults)))
    return lines


def _error(found: np.ndarray, exact: np.ndarray) -> tuple[float, bool]:
    """The relative error; or, of an array that is zero but for rounding, the root mean square, and True."""
    norm = float(np.linalg.norm(exact))
    difference = float(np.linalg.norm(found - exact))
    if norm < 1e-6 * np.sqrt(exact.size):
        return difference / float(np.sqrt(exact.size)), True
    return difference / norm, False


def _show(console: Console, results: Sequence[AccuracyResult], dtype: str) -> None:
    title = f"attention · error beside float64 · {dtype} · {dispatch.target()} · jax {jax.__version__}"
    caption = "error, then how many times cuDNN's, or of shapes with * XLA's"
    table, reasons = make_table(title, ("", "by"), ARRAYS, caption), []
    for line in results:
        cells = [
            (f"{error:.1e}".replace("e-0", "e-") if error else "0") + ("" if ratio is None else f" {ratio:.2f}")
            for error, ratio in zip(line.errors, line.ratios, strict=True)
        ]
        if cells:
            table.add_row(line.shape + (" *" if line.beside == "xla" else ""), line.implementation, *cells)
        if reason := line.reason or "; ".join(line.faults):
            reasons.append((f"{line.implementation}, {line.shape}", reason))
    show(console, table, reasons)
