"""bitsandbytes and Unsloth, where they are installed with a CUDA torch, at the work of `fastjax.bench.nf4`.

Their kernels are captured in a CUDA graph, so that Python does not count, and timed by events around its replay.
"""

import importlib
import statistics
import warnings
from collections.abc import Callable
from typing import Any

from fastjax.bench.timing import Timing


def decodes(shape: tuple[int, int], dtype: str, count: int, rounds: int) -> dict[str, Timing]:
    """Seconds of one decode by each library that is there.

    Args:
        shape: (out, in) of the weight.
        dtype: of the result.
        count: weights that are taken in turn.
        rounds: runs; their median counts.
    """
    torch = _torch()
    if torch is None:
        return {}
    found = {}
    for name, decode in _decoders(dtype).items():
        weights = _weights(torch, shape, dtype, count)
        found[name] = time_calls(torch, [lambda w=w, decode=decode: decode(*w) for w in weights], rounds)
    return found


def products(
    shape: tuple[int, int], dtype: str, rows: int, gradient: bool, count: int, rounds: int
) -> dict[str, Timing]:
    """Seconds of one product, or of its gradient in x, by each library that is there; arguments as `decodes`."""
    torch = _torch()
    if torch is None:
        return {}
    found = {}
    x = torch.randn(rows, shape[0 if gradient else 1], device="cuda", dtype=getattr(torch, dtype))
    weights = _weights(torch, shape, dtype, count)
    for name, decode in _decoders(dtype).items():
        if name == "bitsandbytes" and not gradient:
            multiply = import_module("bitsandbytes").matmul_4bit
            calls = [lambda w=w, multiply=multiply: multiply(x, w[0].t(), quant_state=w[1]) for w in weights]
        else:  # as both libraries do
            calls = [
                lambda w=w, decode=decode: torch.matmul(x, decode(*w) if gradient else decode(*w).t()) for w in weights
            ]
        found[name] = time_calls(torch, calls, rounds)
    return found


def import_module(name: str) -> Any:
    """A module, or None where it is missing or cannot be imported here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their imports' warnings are not this project's
        try:
            return importlib.import_module(name)
        except Exception:
            return None


def _torch() -> Any:
    torch = import_module("torch")
    return (
        torch if torch is not None and torch.cuda.is_available() and import_module("bitsandbytes") is not None else None
    )


def _decoders(dtype: str) -> dict[str, Callable[..., Any]]:
    found = {"bitsandbytes": import_module("bitsandbytes.functional").dequantize_4bit}
    unsloth = import_module("unsloth.kernels.utils") if dtype != "float32" else None
    if unsloth is not None:
        found["unsloth"] = unsloth.fast_dequantize
    return found


def _weights(torch, shape: tuple[int, int], dtype: str, count: int) -> list[tuple[Any, Any]]:
    quantize = import_module("bitsandbytes.functional").quantize_4bit
    made = (torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(count))
    return [quantize(weight, quant_type="nf4", blocksize=64) for weight in made]


def time_calls(torch, calls: list[Callable[[], Any]], rounds: int) -> Timing:
    """Seconds of one call, by events around the replay of a CUDA graph of all of them.

    Args:
        torch: the module.
        calls: without arguments.
        rounds: runs; their median counts.
    """
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    seconds = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    seconds = seconds[2:]
    return Timing(statistics.median(seconds), min(seconds), max(seconds), "events")
