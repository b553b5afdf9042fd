"""Run the recipes of examples/ but my_model, each in a process of its own: held-out loss, time, speed and memory.

    python3 scripts/run_recipes.py                               # all, on the device that JAX finds
    python3 scripts/run_recipes.py chat_lora --dtype bfloat16 --output figures.json

The figures in the recipes' headers come from here. Seconds are of the whole command, from the start of the process on:
imports, preparing the data, compiling, training, evaluating and saving. Memory is the allocator's peak on a GPU, and
the peak of the process on a CPU.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import resource
import statistics
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def processor() -> str:
    """The CPU's name."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}"


def run(name: str, folder: str, dtype: str | None, started: float, queue: multiprocessing.Queue) -> None:
    """One recipe; its figures go into the queue."""
    import jax

    from fastjax.commands.settings import parse_train_config
    from fastjax.runs.fine_tune import fine_tune
    from fastjax.training.metrics import read_rows

    arguments = ["--config", f"examples/{name}.yaml", "--output.output_dir", f"{folder}/{name}"]
    config = parse_train_config(arguments + (["--model.dtype", dtype] if dtype else []))
    result = fine_tune(config)
    seconds = time.time() - started
    rows = list(read_rows(result.folder.parent / "metrics.jsonl"))
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row]
    speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    device = jax.devices()[0]
    on_device = (device.memory_stats() or {}).get("peak_bytes_in_use")
    peak = on_device or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    queue.put(
        {
            "recipe": name,
            "device": processor() if device.platform == "cpu" else device.device_kind,
            "dtype": str(result.model.dtype),
            "jax": jax.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "load": os.getloadavg()[0],
            "steps": max(row["step"] for row in rows),
            "held_out_loss": min(held_out) if config.output.load_best_model_at_end else held_out[-1],
            "seconds": round(seconds, 1),
            "tokens_per_second": round(statistics.median(speeds)),
            "peak_mib": round(peak / 2**20),
        }
    )


def main() -> None:
    recipes = sorted(file.stem for file in (ROOT / "examples").glob("*.yaml") if file.stem != "my_model")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"default: all: {', '.join(recipes)}")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="in place of the device's default")
    parser.add_argument("--runs", default="runs", metavar="FOLDER", help="for the runs' folders (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args()
    if unknown := set(arguments.recipes) - set(recipes):
        parser.error(f"no recipe by the name of {', '.join(sorted(unknown))}")
    output = arguments.output.absolute() if arguments.output else None
    os.chdir(ROOT)  # where the recipes' paths begin
    context, results = multiprocessing.get_context("spawn"), []
    for name in arguments.recipes or recipes:
        queue = context.Queue()
        process = context.Process(target=run, args=(name, arguments.runs, arguments.dtype, time.time(), queue))
        process.start()
        process.join()  # a figure is small enough to wait in the pipe
        if process.exitcode:
            raise SystemExit(f"{name}: the run ended with exit code {process.exitcode}")
        results.append(queue.get())
        print(json.dumps(results[-1]), flush=True)
        if output:
            output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
