"""One process with all GPUs beside one process a GPU: their losses must be equal, and their speed is compared.

    python3 scripts/measure_processes.py --output runs/processes
    XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python3 … --tiny      # a try without cards

QLoRA of Llama 3.2 1B's shape with random weights, 2×4,096 random words a GPU, data parallel, by `fastjax train` and
`fastjax launch`. The exit status is 1 where a loss differs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import yaml
from measure_four_cards import write_run


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model and the runs")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="the smallest preset")
    arguments = parser.parse_args()
    options = {"max_steps": arguments.steps, "logging_steps": 1, "per_device_train_batch_size": 2}
    file = write_run(arguments.output, arguments.tiny, "llama3.2-1b", {"data": arguments.gpus}, **options)
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    launch = ["launch", "-n", str(arguments.gpus), "--"]
    apart = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS" or not arguments.tiny}
    found = {}
    for name, before, environment in (("one process", [], dict(os.environ)), ("a process a GPU", launch, apart)):
        settings["output"]["output_dir"] = str(arguments.output / name.replace(" ", "-"))
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [sys.executable, "-m", "fastjax", *before, "train", "--config", str(file)]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        lines = (Path(settings["output"]["output_dir"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        speed = statistics.median(row["tokens_per_second"] for row in rows[len(rows) // 2 :])
        found[name] = [row["loss"] for row in rows], speed
        print(f"{name}: {speed:,.0f} tokens/s, losses {found[name][0][0]:.6f} to {found[name][0][-1]:.6f}", flush=True)
    (one, first), (several, second) = found.values()
    largest = max(abs(a - b) for a, b in zip(one, several, strict=True))
    print(f"{second / first - 1:+.2%} tokens/s; largest difference of {len(one)} losses {largest:.2g}")
    return int(largest > 0)


if __name__ == "__main__":
    sys.exit(main())
