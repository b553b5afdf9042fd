"""Steps on several meshes and with sets of XLA's options, one after another in one process, and what each card does.

    python3 scripts/measure_meshes.py one data=2 fsdp=2 --traces traces
    python3 scripts/measure_meshes.py fsdp=2 --options none xla_gpu_nccl_collective_max_nchannels=8 --steps 10

`fastjax bench step` gives figures that count: each case in a process of its own, first losses compared.
This compares nothing, and is sooner done: losses of the same rows must agree. With --traces it shows for
each card, in ms a step: all kernels but collectives, cuBLAS's products among them, collectives that nothing runs
beside, and the time in which nothing runs.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastjax.bench.presets import PRESETS
from fastjax.bench.step.build import read_mesh
from fastjax.bench.step.case import METHODS, StepCase, resolve_method
from fastjax.bench.step.measure import PROFILED, measure
from fastjax.bench.trace import Kernel, busy_ns, read_kernels
from fastjax.training.config.qat import NAMED

#: Kernels by their names.
COLLECTIVES = re.compile(r"nccl|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective", re.IGNORECASE)
PRODUCTS = re.compile(r"nvjet|cublas|cutlass|xmma|splitk", re.IGNORECASE)


def of_each_card(kernels: Sequence[Kernel]) -> dict[str, dict[str, float]]:
    """Where a card's time goes, in ms a step."""

    def milliseconds(some: Iterable[Kernel]) -> float:
        return busy_ns(list(some)) * 1e-6 / PROFILED

    found = {}
    for name in sorted({kernel.device for kernel in kernels}):
        own = [kernel for kernel in kernels if kernel.device == name]
        others = [kernel for kernel in own if not COLLECTIVES.search(kernel.name)]
        whole = (max(kernel.end for kernel in own) - own[0].start) * 1e-6 / PROFILED
        busy, computes = milliseconds(own), milliseconds(others)
        products = milliseconds(kernel for kernel in others if PRODUCTS.search(kernel.name))
        found[name] = {
            "step": whole, "computes": computes, "products": products, "exposed": busy - computes, "idle": whole - busy
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("meshes", nargs="+", help="one, or sizes of axes as in fsdp=2,tensor=2")
    parser.add_argument("--options", nargs="+", default=["none"], help="sets of XLA's, NAME=VALUE,NAME=VALUE")
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--checkpointing", default="projections")
    parser.add_argument("--layer_loop", default="scan")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3, help="steps before these; 1 where one takes long")
    parser.add_argument("--qat", choices=NAMED, help="quantisation-aware training, merge-aware with adapters")
    parser.add_argument("--traces", type=Path, help="folder")
    parser.add_argument("--output", type=Path, help="JSON lines")
    arguments = parser.parse_args()
    method, weights = resolve_method(arguments.method, None)
    full: dict[str, Any] = {"param_dtype": "bfloat16", "optimizer": "adamw_16bit"} if method == "full" else {}
    for number, (mesh, options) in enumerate(itertools.product(arguments.meshes, arguments.options)):
        case = StepCase(
            arguments.preset, arguments.batch, arguments.seq, arguments.checkpointing, arguments.layer_loop, method,
            weights, layers=arguments.layers, mesh=read_mesh(mesh), steps=arguments.steps, warmup=arguments.warmup,
            compiler_options=() if options == "none" else tuple(options.split(",")), qat=arguments.qat, **full,
        )  # fmt: skip
        folder = None if arguments.traces is None else arguments.traces / str(number)
        result = measure(case, folder)
        row = {
            "mesh": case.where, "options": options, "step_seconds": result.step_seconds,
            "tokens_per_second": result.tokens_per_second, "compile_seconds": result.compile_seconds,
            "step_bytes": result.step_bytes, "first_losses": result.losses[:3], "failed": result.fault or result.error,
            "cards": of_each_card(read_kernels(folder)) if folder is not None and result.step_seconds else {},
        }  # fmt: skip
        if arguments.output is not None:
            with open(arguments.output, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        figures = "no figure" if result.step_seconds is None else f"{result.step_seconds * 1e3:.1f} ms"
        print(f"{case.where}, {options}: {row['failed'] or figures}, first losses {row['first_losses']}", flush=True)
        for card, parts in row["cards"].items():
            print(f"  {card}: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items()), flush=True)


if __name__ == "__main__":
    main()
