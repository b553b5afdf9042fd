"""Other libraries' kernels where they are installed with a CUDA torch: bitsandbytes, Unsloth, torch's own.

They are captured in a CUDA graph, so that Python does not count, and timed by events around its replay. Every function
gives for each library that is there its way of timing an operation; its arrays are made when it is asked.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastjax.bench.timing import Timed
from pallas_kernels.grouped_matmul.shapes import Shape

_CALLS = 8


def nf4(
    shape: tuple[int, int], dtype: str, count: int, rows: int | None = None, gradient: bool = False
) -> dict[str, Timed]:
    """One decode, product or gradient of x.

    Args:
        shape: (out, in) of the weight.
        dtype: of the decoded weight and of x.
        count: weights that are taken in turn.
        rows: of x in the product; None: a decode alone.
        gradient: of x in place of the product.
    """
    torch = _torch("bitsandbytes")
    if torch is None:
        return {}
    decoders = {"bitsandbytes": import_module("bitsandbytes.functional").dequantize_4bit}
    unsloth = import_module("unsloth.kernels.utils") if dtype != "float32" else None
    if unsloth is not None:
        decoders["unsloth"] = unsloth.fast_dequantize

    def timed(name: str, decode: Callable[..., Any]) -> Timed:
        def call(x: Any, weight: Any) -> Callable[[], Any]:
            if x is None:
                return lambda: decode(*weight)
            if name == "bitsandbytes" and not gradient:
                multiply = import_module("bitsandbytes").matmul_4bit
                return lambda: multiply(x, weight[0].t(), quant_state=weight[1])
            return lambda: torch.matmul(x, decode(*weight) if gradient else decode(*weight).t())  # as both libraries do

        def run(rounds: int) -> list[float]:
            quantize, kind = import_module("bitsandbytes.functional").quantize_4bit, getattr(torch, dtype)
            x = None if rows is None else torch.randn(rows, shape[0 if gradient else 1], device="cuda", dtype=kind)
            dense = (torch.randn(*shape, device="cuda", dtype=kind) for _ in range(count))
            weights = [quantize(weight, quant_type="nf4", blocksize=64) for weight in dense]
            return time_calls(torch, [call(x, weight) for weight in weights], rounds)

        return run

    return {name: timed(name, decode) for name, decode in decoders.items()}


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
        def run(rounds: int) -> list[float]:
            ends = torch.tensor(np.cumsum(group_sizes), dtype=torch.int32, device="cuda")
            sizes = (shape.rows, shape.into), (shape.experts, shape.out, shape.into), (shape.rows, shape.out)
            x, w, dy = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in sizes)
            seconds = time_calls(torch, [lambda: call(x, w, dy, ends)] * _CALLS, rounds)
            del x, w, dy
            torch.cuda.empty_cache()
            return seconds

        return run

    calls: dict[str, Callable[..., Any]] = {
        "forward": lambda x, w, dy, ends: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
        "gradient in x": lambda x, w, dy, ends: torch._grouped_mm(dy, w, offs=ends),
        "gradient in w": lambda x, w, dy, ends: torch._grouped_mm(dy.t(), x, offs=ends),
    }
    return {name: timed(call) for name, call in calls.items()}


def gated_delta(shape: tuple[int, int, int, int, int], dtype: str, documents: int, gradients: bool) -> dict[str, Timed]:
    """flash-linear-attention's gated delta rule, by chunks.

    Args:
        shape: rows, tokens, heads of keys, heads of values, and their size.
        dtype: of queries, keys and values.
        documents: equal ones of a row; more than one are of one row.
        gradients: whether with the gradients of all operands.
    """
    torch, module = _torch("fla"), import_module("fla.ops.gated_delta_rule")
    rows, length, key_heads, heads, size = shape
    if torch is None or module is None or (documents > 1 and rows > 1):
        return {}

    def run(rounds: int) -> list[float]:
        kind, sizes = getattr(torch, dtype), (key_heads, key_heads, heads, heads)
        arrays = [torch.randn(rows, length, count, size, device="cuda") for count in sizes]
        q, k = (torch.nn.functional.normalize(array, dim=-1) for array in arrays[:2])
        gates = [torch.randn(rows, length, heads, device="cuda") for _ in range(2)]
        operands = [*(array.to(kind) for array in (q, k, arrays[2])), -torch.exp(2 * gates[0] - 2), gates[1].sigmoid()]
        operands, dout = [array.requires_grad_(gradients) for array in operands], arrays[3].to(kind)
        ends = torch.arange(documents + 1, device="cuda") * (length // documents) if documents > 1 else None

        def call():
            out, _ = module.chunk_gated_delta_rule(*operands, scale=size**-0.5, cu_seqlens=ends)
            return torch.autograd.grad(out, operands, dout) if gradients else out

        return time_calls(torch, [call], rounds)

    return {"flash-linear-attention": run}


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


def time_calls(torch: Any, calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Seconds of one call in each round, by events around the replay of a CUDA graph of all of them.

    Args:
        torch: the module.
        calls: without arguments.
        rounds: runs.
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
    return seconds[2:]
