"""Other libraries' kernels where they are installed with a CUDA torch: bitsandbytes, Unsloth, torch's own.

They are captured in a CUDA graph, so that Python does not count, and timed by events around its replay. Every function
gives for each library that is there its way of timing an operation; its arrays are made when it is asked.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastjax.bench.tables import Timed
from fastjax.bench.timing import Timing, timing_of
from pallas_kernels.grouped_matmul.shapes import Shape

_CALLS = 8


def nf4_decodes(shape: tuple[int, int], dtype: str, count: int) -> dict[str, Timed]:
    """One decode.

    Args:
        shape: (out, in) of the weight.
        dtype: of the result.
        count: weights that are taken in turn.
    """
    torch = _torch("bitsandbytes")

    def timed(decode: Callable[..., Any]) -> Timed:
        return lambda rounds: time_calls(
            torch, [lambda w=w: decode(*w) for w in _weights(torch, shape, dtype, count)], rounds
        )

    return {} if torch is None else {name: timed(decode) for name, decode in _decoders(dtype).items()}


def nf4_products(shape: tuple[int, int], dtype: str, rows: int, gradient: bool, count: int) -> dict[str, Timed]:
    """One product, or its gradient in x; arguments as `nf4_decodes`, and the rows of x."""
    torch = _torch("bitsandbytes")

    def timed(name: str, decode: Callable[..., Any]) -> Timed:
        def run(rounds: int) -> Timing:
            x = torch.randn(rows, shape[0 if gradient else 1], device="cuda", dtype=getattr(torch, dtype))
            weights = _weights(torch, shape, dtype, count)
            if name == "bitsandbytes" and not gradient:
                multiply = import_module("bitsandbytes").matmul_4bit
                calls = [lambda w=w: multiply(x, w[0].t(), quant_state=w[1]) for w in weights]
            else:  # as both libraries do
                calls = [lambda w=w: torch.matmul(x, decode(*w) if gradient else decode(*w).t()) for w in weights]
            return time_calls(torch, calls, rounds)

        return run

    return {} if torch is None else {name: timed(name, decode) for name, decode in _decoders(dtype).items()}


def grouped_products(shape: Shape, dtype: str, group_sizes: np.ndarray) -> dict[str, Timed]:
    """`torch._grouped_mm` forward and in both gradients, by the name of the pass; empty where torch has none.

    Args:
        shape: of the product.
        dtype: of the operands.
        group_sizes: rows of each expert.
    """
    torch = _torch()
    if torch is None or not hasattr(torch, "_grouped_mm") or dtype != "bfloat16":
        return {}

    def timed(call: Callable[..., Any]) -> Timed:
        def run(rounds: int) -> Timing:
            ends = torch.tensor(np.cumsum(group_sizes), dtype=torch.int32, device="cuda")
            sizes = (shape.rows, shape.into), (shape.experts, shape.out, shape.into), (shape.rows, shape.out)
            x, w, dy = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in sizes)
            found = time_calls(torch, [lambda: call(x, w, dy, ends)] * _CALLS, rounds)
            del x, w, dy
            torch.cuda.empty_cache()
            return found

        return run

    calls: dict[str, Callable[..., Any]] = {
        "forward": lambda x, w, dy, ends: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
        "gradient in x": lambda x, w, dy, ends: torch._grouped_mm(dy, w, offs=ends),
        "gradient in w": lambda x, w, dy, ends: torch._grouped_mm(dy.t(), x, offs=ends),
    }
    return {name: timed(call) for name, call in calls.items()}


def import_module(name: str) -> Any:
    """A module, or None where it is missing or cannot be imported here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their imports' warnings are not this project's
        try:
            return importlib.import_module(name)
        except Exception:
            return None


def _torch(*others: str) -> Any:
    """torch, where it has a GPU and the others are there; else None."""
    torch = import_module("torch")
    there = torch is not None and torch.cuda.is_available() and all(import_module(name) is not None for name in others)
    return torch if there else None


def _decoders(dtype: str) -> dict[str, Callable[..., Any]]:
    found = {"bitsandbytes": import_module("bitsandbytes.functional").dequantize_4bit}
    unsloth = import_module("unsloth.kernels.utils") if dtype != "float32" else None
    if unsloth is not None:
        found["unsloth"] = unsloth.fast_dequantize
    return found


def _weights(torch: Any, shape: tuple[int, int], dtype: str, count: int) -> list[tuple[Any, Any]]:
    quantize = import_module("bitsandbytes.functional").quantize_4bit
    made = (torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(count))
    return [quantize(weight, quant_type="nf4", blocksize=64) for weight in made]


def time_calls(torch: Any, calls: Sequence[Callable[[], Any]], rounds: int) -> Timing:
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
    return timing_of(seconds[2:], "events")
