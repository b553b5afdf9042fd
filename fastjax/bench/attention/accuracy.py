"""Accuracy of attention: the output and the gradients of q, k and v, beside the plain formula in float64.

The error of an array is ‖found − exact‖ / ‖exact‖ (Frobenius). It is compared with cuDNN's in the same call, or, where
cuDNN cannot serve it, with XLA's in the same 16 bits: 1.2 times as much is the bar. An array that is zero but for
rounding (the gradient of a query that sees one key) is held to the rounding of the dtype instead. Rows of nothing but
padding must give zeros, and nothing may be NaN or infinite. The exact results are computed on the device, in float64.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

from fastjax.bench.attention.cases import Problem, check_names, make_arrays, segment_ids
from fastjax.bench.attention.contenders import Attend, both, ours
from fastjax.bench.tables import Row, print_rows, save, why
from fastjax.bench.timing import side_by_side
from pallas_kernels import dispatch
from pallas_kernels.attention import reference

ARRAYS = ("out", "dq", "dk", "dv")
IMPLEMENTATIONS = ("mosaic", "cudnn", "triton", "xla")
BAR = 1.2


def _small(length: int = 512, batch: int = 1, size: int = 128, **others: Any) -> Problem:
    return Problem("", batch, length, 4, 2, size, **others)


#: Calls of four query heads over two key heads.
SHAPES: dict[str, Problem] = {
    **{f"D={size}": _small(256, size=size) for size in (64, 80, 96, 112, 128, 192, 256)},
    "D=192 Dv=128": _small(256, size=192, value_size=128),
    "D=64 Dv=128": _small(256, size=64, value_size=128),
    **{f"length {length}": _small(length) for length in (1, 333, 700, 1024)},
    "not causal": _small(causal=False),
    "documents": _small(batch=3, documents=((100, 1, 37, 1, 1, 128, 64, 150), (300, 212), ()), size=64),
    "window": _small(700, window=100),
    "window, documents": _small(batch=2, documents=((1, 300, 150), ()), window=64),
    "cap": _small(cap=5.0),
    "sinks": _small(sinks=True),
    "cap, sinks, window": _small(cap=5.0, window=130, sinks=True, size=64),
    "S=200 T=700": _small(200, keys=700),
    "S=333 T=512 offset 64": _small(333, keys=512, offset=64),
}


def run(
    implementations: Sequence[str] = IMPLEMENTATIONS,
    shapes: Sequence[str] = tuple(SHAPES),
    dtype: str = "bfloat16",
    output: Path | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Compute, compare, show a table, write a file.

    Args:
        implementations: of `IMPLEMENTATIONS`.
        shapes: of `SHAPES`.
        dtype: bfloat16 or float16.
        output: JSON file for the device and the rows; None: no file.
        console: for the table.

    Returns:
        The rows (`compared`).

    Raises:
        ConfigError: an unknown name.
        OSError: the file cannot be written.
    """
    console = console or Console()
    check_names("--implementations", implementations, IMPLEMENTATIONS)
    check_names("--shapes", shapes, tuple(SHAPES))
    # the others are compared with cuDNN and XLA
    wanted = ("exact", *dict.fromkeys((*implementations, "cudnn", "xla")))
    inputs = {name: make_arrays(SHAPES[name], dtype)[0] for name in shapes}
    jobs = list(itertools.product(shapes, wanted))
    compiled = side_by_side([partial(_compiled, SHAPES[name], who, inputs[name]) for name, who in jobs])
    functions, rows = dict(zip(jobs, compiled, strict=True)), []
    for name in shapes:
        found = {who: _results(functions[name, who], inputs[name], exact=who == "exact") for who in wanted}
        rows += compared(name, SHAPES[name], found, implementations, dtype)
    title = f"attention · error beside float64 · {dtype} · {dispatch.target()} · jax {jax.__version__}"
    caption = "error, then how many times cuDNN's, or of shapes with * XLA's"
    words = {
        "": lambda row: row["shape"] + (" *" if row["beside"] == "xla" else ""),
        "by": lambda row: row["implementation"],
    }
    numbers = {array: lambda row, place=place: _written(row, place) for place, array in enumerate(ARRAYS)}
    print_rows(console, title, rows, words, numbers, caption)
    for row in (bad := [row for row in rows if row["faults"]]):
        console.print(f"{row['implementation']}, {row['shape']}: {'; '.join(row['faults'])}", highlight=False)
    told = f"{len(bad)} of {len(rows)} lines at fault" if bad else f"all within {BAR} times"
    console.print(told, highlight=False)
    save(output, rows, console, dtype=dtype, bar=BAR)
    return rows


def _compiled(problem: Problem, who: str, arrays: dict[str, Any]) -> Callable[..., Any]:
    """Output and gradients, by an implementation or exactly."""
    if who != "exact":
        return jax.jit(both(ours(who, problem))).lower(arrays).compile()

    def exact(arrays: dict[str, Any]) -> Any:
        options = {"segment_ids": arrays.get("ids"), "sinks": arrays.get("sinks"), **problem.options}
        return reference.attention(arrays["q"], arrays["k"], arrays["v"], **options)

    attend: Attend = exact
    with jax.enable_x64(True):
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _wide(leaf)), arrays)
        return jax.jit(both(attend)).lower(shapes).compile()


def _wide(leaf: Array) -> Any:
    """float64 for the numbers; sinks stay float32, which holds them exactly."""
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


def compared(
    name: str, problem: Problem, found: dict[str, Any], implementations: Sequence[str], dtype: str
) -> list[Row]:
    """The rows of a shape.

    Args:
        name: of the shape.
        problem: the call.
        found: output and gradients, or why there are none, by implementation and as "exact".
        implementations: a row each.
        dtype: of the arrays.

    Returns:
        Rows of `shape`, `implementation`, `errors` of `ARRAYS` (of those that are zero but for rounding, the root mean
        square), their `ratios` to those of the implementation `beside` (None for those that are zero), `faults`, and
        the `reason` why there are no errors.
    """
    exact = found["exact"]
    if isinstance(exact, Exception):
        raise exact
    beside = "xla" if isinstance(found["cudnn"], Exception) else "cudnn"
    baseline = found[beside]
    if isinstance(baseline, Exception):
        raise baseline
    rounding = float(jnp.finfo(dtype).eps) / 2
    padding = None if problem.documents is None else segment_ids(problem.documents, problem.length) == 0
    rows = []
    for who in implementations:
        results = found[who]
        row = {"shape": name, "implementation": who, "errors": [], "ratios": [], "beside": beside, "faults": []}
        rows.append(row | {"reason": why(results) if isinstance(results, Exception) else None})
        if isinstance(results, Exception):
            continue
        errors, ratios, faults = row["errors"], row["ratios"], row["faults"]
        for array, own, theirs, wanted in zip(ARRAYS, results, baseline, exact, strict=True):
            error, zero = _error(own, wanted)
            errors.append(error)
            # what the other has exactly right need not be right to more than a tenth of a rounding
            ratios.append(None if zero else error / max(_error(theirs, wanted)[0], rounding / 10))
            if not np.all(np.isfinite(own)):
                faults.append(f"{array} is not finite")
            elif (error > rounding) if zero else (ratios[-1] > BAR):
                faults.append(f"{array} is above the bar")
            if padding is not None and np.any(own[padding]):
                faults.append(f"{array} of padding is not zero")
    return rows


def _error(found: np.ndarray, exact: np.ndarray) -> tuple[float, bool]:
    """The relative error; or, of an array that is zero but for rounding, the root mean square, and True."""
    norm = float(np.linalg.norm(exact))
    difference = float(np.linalg.norm(found - exact))
    if norm < 1e-6 * np.sqrt(exact.size):
        return difference / float(np.sqrt(exact.size)), True
    return difference / norm, False


def _written(row: Row, place: int) -> str:
    error, ratio = row["errors"][place], row["ratios"][place]
    return (f"{error:.1e}".replace("e-0", "e-") if error else "0") + ("" if ratio is None else f" {ratio:.2f}")
