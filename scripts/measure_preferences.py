"""DPO of a real model on GSM8K: right answers against the model's own wrong ones; its speed and memory beside SFT's.

    python3 scripts/measure_preferences.py --model FOLDER --data train.jsonl --output runs/preferences

FOLDER is SmolLM2-135M-Instruct in Hugging Face format, or another model with a chat template. The data are JSON lines
with `question` and `answer`. The model answers the questions by sampling; where its last number is not the row's, that
is a pair. The last 256 pairs are held
out. Then two runs of `fastjax train`, equal but for the loss, each in a process
of its own, without recomputation: supervised on both answers of each pair, and DPO on the pairs. Further arguments go
to both.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SETTINGS: dict[str, Any] = {
    "model": {"max_seq_length": 1024, "load_in_4bit": False, "use_gradient_checkpointing": "none"},
    "lora": {"r": 16, "lora_alpha": 16},
    "optimizer": {"learning_rate": 5e-5, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
    "training": {"per_device_train_batch_size": 8, "num_train_epochs": 1, "logging_steps": 20},
    "output": {"overwrite_output_dir": True},
}


def number_of(text: str) -> float | None:
    """The last number of an answer."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def write_pairs(arguments: argparse.Namespace, file: Path) -> None:
    """Let the model answer; its wrong answers are the rejected ones."""
    from fastjax import FastLanguageModel
    from fastjax.generation.text import answer

    lines = arguments.data.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    rows = [json.loads(line) for line in lines]
    model, _ = FastLanguageModel.from_pretrained(str(arguments.model), max_seq_length=1024, load_in_4bit=False)
    said = answer(
        model, [row["question"] for row in rows], max_new_tokens=256, temperature=0.7, top_p=0.95, batch_size=256
    )
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": text}
        for row, text in zip(rows, said, strict=True)
        if text.strip() and number_of(text) != number_of(row["answer"])
    ]
    print(f"{len(pairs):,} of {len(rows):,} answers are wrong, {len(rows) - len(pairs):,} right or empty", flush=True)
    turns = [
        {key: [{"role": role, "content": pair[key]}] for key, role in (("prompt", "user"), *_ANSWERS)} for pair in pairs
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in turns), encoding="utf-8")


_ANSWERS = (("chosen", "assistant"), ("rejected", "assistant"))


def write_data(pairs: Path, folder: Path, held_out: int) -> dict[str, dict[str, str]]:
    """The files of both runs, by run and split."""
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    files: dict[str, dict[str, str]] = {"sft": {}, "dpo": {}}
    for split, part in (("train", rows[:-held_out]), ("eval", rows[-held_out:])):
        both = [{"messages": row["prompt"] + row[key]} for row in part for key, _ in _ANSWERS]
        for run, written in (("sft", both), ("dpo", part)):
            file = folder / f"{run}_{split}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
            files[run][split] = str(file)
    return files


def train(
    arguments: argparse.Namespace, run: str, files: dict[str, str], others: Sequence[str]
) -> list[dict[str, Any]]:
    """One run; the rows of its metrics."""
    import yaml

    folder = arguments.output / run
    settings = {section: dict(values) for section, values in _SETTINGS.items()}
    settings["model"]["model_name"] = str(arguments.model)
    settings["data"] = files | {"cache_dir": str(arguments.output / "cache")}
    settings["output"]["output_dir"] = str(folder)
    if run == "dpo":
        settings["preferences"] = {"loss": "dpo", "beta": arguments.beta}
    file = arguments.output / f"{run}.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "fastjax", "train", "--config", str(file), *others], check=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Make the pairs, run twice, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=4096)
    parser.add_argument("--held_out", type=int, default=256, help="pairs")
    parser.add_argument("--beta", type=float, default=0.1)
    arguments, others = parser.parse_known_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    pairs = arguments.output / "pairs.jsonl"
    if not pairs.exists():
        write_pairs(arguments, pairs)
    files = write_data(pairs, arguments.output, arguments.held_out)
    figures = {}
    for run in ("sft", "dpo"):
        rows = train(arguments, run, files[run], others)
        speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
        peak = max((row["memory_bytes"] for row in rows if row.get("memory_bytes")), default=0)
        figures[run] = (statistics.median(speeds), peak)
        [*_, last] = [row for row in rows if "eval_loss" in row]
        accuracy = last.get("eval_rewards/accuracies")
        print(f"{run}: {figures[run][0]:,.0f} tokens/s, {peak / 2**30:.2f} GiB, held-out loss {last['eval_loss']:.4f}"
              + ("" if accuracy is None else f", accuracy of preference {accuracy:.3f}"))  # fmt: skip
    (sft, small), (dpo, large) = figures["sft"], figures["dpo"]
    memory = f", {large / small:.2f} of its memory" if small else ""
    print(f"DPO has {dpo / sft:.3f} of SFT's tokens/s{memory}")


if __name__ == "__main__":
    main()
