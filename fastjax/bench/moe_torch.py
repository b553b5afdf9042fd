"""torch's products over groups, where it is installed with CUDA, at the work of `fastjax.bench.moe`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fastjax.bench.nf4_torch import import_module, time_calls
from fastjax.bench.timing import Timing
from pallas_kernels.grouped_matmul.shapes import Shape

_CALLS = 8


def products(shape: Shape, dtype: str, group_sizes: np.ndarray, rounds: int) -> dict[tuple[str, str], Timing]:
    """Seconds of `torch._grouped_mm` forward and in both gradients; empty where torch has none.

    Args:
        shape: of the product.
        dtype: of the operands.
        group_sizes: rows of each expert.
        rounds: runs; their median counts.
    """
    torch: Any = import_module("torch")
    if torch is None or not torch.cuda.is_available() or not hasattr(torch, "_grouped_mm") or dtype != "bfloat16":
        return {}

    def draw(*sizes: int) -> Any:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    ends = torch.tensor(np.cumsum(group_sizes), dtype=torch.int32, device="cuda")
    x, w, dy = draw(shape.rows, shape.into), draw(shape.experts, shape.out, shape.into), draw(shape.rows, shape.out)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
        "gradient in x": lambda: torch._grouped_mm(dy, w, offs=ends),
        "gradient in w": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
    }
    found = {(name, "torch"): time_calls(torch, [call] * _CALLS, rounds) for name, call in calls.items()}
    del x, w, dy
    torch.cuda.empty_cache()
    return found
