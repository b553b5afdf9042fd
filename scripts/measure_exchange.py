"""Full fine-tuning by two GPUs whose gradients travel in float32 and in fewer bits: bytes on the link, losses, speed.

    python3 scripts/measure_exchange.py --data train.jsonl --tokenizer FOLDER --output runs/exchange

The model, the data and the learning rate are those of scripts/compare_methods.py: a Llama of about 100 million
parameters with random weights, the first half of the rows. The bytes are those of the step compiled for H200s, as
`fastjax plan` counts them. Each run is a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from compare_methods import in_process, make_base, run, split

#: Steps at the end whose mean training loss is compared.
LAST = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with question and answer, or messages")
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", default=["float32", "int4"], help="the first is compared with")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="rows of 2,048 tokens a GPU and step")
    parser.add_argument("--replicas", type=int, default=2, help="GPUs")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    files = split(arguments.data, arguments.output, held_out=400)
    base = str(arguments.output / "base")
    in_process(make_base, arguments.tokenizer, base)
    found = []
    for name in arguments.formats:
        settings = {
            "model": {
                "model_name": base, "full_finetuning": True, "load_in_4bit": False, "max_seq_length": 2048,
                "use_gradient_checkpointing": False,
            },
            "data": {"train": files["first"], "loss_on": "all", "cache_dir": str(arguments.output / "cache")},
            "output": {"output_dir": str(arguments.output / name), "overwrite_output_dir": True},
            "optimizer": {"learning_rate": 1e-3, "warmup_ratio": 0.05, "weight_decay": 0.01},
            "training": {
                "per_device_train_batch_size": arguments.batch, "max_steps": arguments.steps, "logging_steps": 1,
            },
            "parallel": {"data": arguments.replicas, "gradient_exchange": name},
        }  # fmt: skip
        sent = bytes_on_the_link(settings, arguments.output / f"{name}.yaml", arguments.replicas)
        result = in_process(run, name, settings)
        lines = (Path(result["folder"]).parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        found.append({
            "format": name, "device": result["device"], "replicas": arguments.replicas, "bytes_on_the_link": sent,
            "last_losses": statistics.fmean(row["loss"] for row in rows[-LAST:]),
            "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows[len(rows) // 2 :]),
            "losses": [row["loss"] for row in rows],
        })  # fmt: skip
        (arguments.output / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        first, own = found[0], found[-1]
        print(
            f"{name}: {sent / 1e6:,.1f} MB a GPU and step, 1/{first['bytes_on_the_link'] / sent:.2f}; mean loss of the "
            f"last {min(LAST, len(rows))} of {len(rows)} steps {own['last_losses']:.4f}, "
            f"{own['last_losses'] / first['last_losses'] - 1:+.2%}; {own['tokens_per_second']:,.0f} tokens/s",
            flush=True,
        )


def bytes_on_the_link(settings: dict[str, Any], file: Path, replicas: int) -> float:
    """Bytes that a GPU sends in a step, by the step compiled for H200s."""
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    plan = file.with_suffix(".plan.json")
    command = [sys.executable, "-m", "fastjax", "plan", str(file), "--gpu", "h200", "--gpus", str(replicas)]
    subprocess.run([*command, "--checkpointing", "projections", "--output", str(plan)], check=True, capture_output=True)
    (policy,) = json.loads(plan.read_text(encoding="utf-8"))["policies"]
    return sum(policy["link_bytes"].values())


if __name__ == "__main__":
    main()
