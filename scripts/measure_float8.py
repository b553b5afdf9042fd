"""Quality that float8 costs: held-out loss beside bfloat16's over several seeds.

    python3 scripts/measure_float8.py --model FOLDER --data train.jsonl --output runs/float8

Each run is that of `scripts/measure_real_model.py train`: QLoRA of a real model on GSM8K, three epochs, half a minute
on an H200. Both ways have the same seeds, so the same first adapter and the same rows in the same order; the spread of
a way over its seeds is what the difference of the ways stands beside.
"""

import argparse
import json
import statistics
from pathlib import Path

from measure_real_model import train

#: Settings of each way beside the others.
WAYS: dict[str, list[str]] = {"bfloat16": [], "float8": ["--model.base_compute=float8"]}


def held_out_loss(arguments: argparse.Namespace, way: str, seed: int) -> float:
    """The loss at the end of one run."""
    folder = arguments.output / f"{way}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    own = argparse.Namespace(model=arguments.model, data=arguments.data, output=folder)
    train(own, [*WAYS[way], f"--training.seed={seed}", f"--lora.random_state={seed}", *arguments.others])
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["eval_loss"] for row in rows if "eval_loss" in row][-1]


def main() -> None:
    """Run all, then print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with a chat template")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with question and answer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, arguments.others = parser.parse_known_args()
    for name in ("model", "data", "output"):
        setattr(arguments, name, getattr(arguments, name).absolute())
    found = {way: [held_out_loss(arguments, way, seed) for seed in arguments.seeds] for way in WAYS}
    print(f"{'held-out loss':14}" + "".join(f"{f'seed {seed}':>10}" for seed in arguments.seeds) + f"{'mean':>10}")
    for way, losses in found.items():
        print(f"{way:14}" + "".join(f"{loss:10.4f}" for loss in losses) + f"{statistics.mean(losses):10.4f}")
    differences = [b - a for a, b in zip(*found.values(), strict=True)]
    print(
        f"{'difference':14}"
        + "".join(f"{one:+10.4f}" for one in differences)
        + f"{statistics.mean(differences):+10.4f}"
    )
    if len(arguments.seeds) > 1:
        print(f"standard deviation over the seeds: {statistics.stdev(found['bfloat16']):.4f} in bfloat16")


if __name__ == "__main__":
    main()
