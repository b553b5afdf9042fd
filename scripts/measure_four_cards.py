"""The largest models on four cards of one host: steps, scaling, loading, and what a killed process does to the others.

    python3 scripts/measure_four_cards.py --output runs/four                     # everything, an hour of four H200s
    python3 scripts/measure_four_cards.py --output runs/four --only seventy scaling
    XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu python3 … --tiny      # a try without cards

- seventy: QLoRA of Llama 3 70B's shape, 1×4,096 and 2×4,096 tokens a card, fsdp 4 and tensor 2 × fsdp 2
- scaling: of 8B's, the same rows a card on one, two and four
- mixture: of Qwen3-235B-A22B's, whose weights are drawn on the cards in their parts
- load: `fastjax train` of a folder of 70B's shape in 16 bits, to 4 bits, over fsdp 4: seconds until it is there
- killed: `fastjax launch -n 4`, one of whose processes gets SIGKILL: seconds until all have ended

The steps are `fastjax bench step`'s, whose JSON goes to the output folder.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from fastjax.bench.peer_models import write_model
from fastjax.bench.presets import preset_config

#: Arguments of `fastjax bench step`, by part.
STEPS: dict[str, list[list[str]]] = {
    "seventy": [
        ["--preset", "llama3-70b", "--batch", batch, "--seq", "4096", "--mesh", "fsdp=4", "tensor=2,fsdp=2"]
        + ["--checkpointing", "projections", "full", "--steps", "5"]
        for batch in ("1", "2")
    ],
    "scaling": [
        ["--preset", "llama3-8b", "--mesh", "one", "data=2", "data=4", "fsdp=4", "--checkpointing", "projections"]
    ],
    "mixture": [
        ["--preset", "qwen3-235b-a22b", "--batch", "1", "--seq", "2048", "--mesh", "fsdp=4", "fsdp=2,expert=2"]
        + ["--checkpointing", "full", "--steps", "5"]
    ],
}
PARTS = (*STEPS, "load", "killed")
#: Steps before a process is killed, and seconds in which the others must have ended.
STEPS_BEFORE, MOST = 3, 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of results; the model goes there too")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tiny", action="store_true", help="the smallest preset in place of all")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for part in arguments.only:
        print(f"== {part}", flush=True)
        if part in STEPS:
            for number, given in enumerate(STEPS[part]):
                bench(arguments.output / f"{part}-{number}", small(given) if arguments.tiny else given)
        else:
            found = {"load": load, "killed": killed}[part](arguments.output.absolute(), arguments.tiny)
            (arguments.output / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(found), flush=True)


def small(given: list[str]) -> list[str]:
    """This measurement on the tiny preset."""
    others = {"--preset": "tiny", "--batch": "2", "--seq": "64", "--steps": "2"}
    found = [others.get(before, own) for before, own in zip(["", *given], given, strict=False)]
    found = [own if own != "fsdp=2,expert=2" else "fsdp=2,data=2" for own in found]  # it has no experts
    return found + [word for name, value in others.items() if name not in given for word in (name, value)]


def bench(file: Path, given: list[str]) -> None:
    """One call of `fastjax bench step`; a case that fails does not end the others."""
    command = [sys.executable, "-m", "fastjax", "bench", "step", *given, "--output", f"{file}.json"]
    if status := subprocess.run(command).returncode:
        print(f"exit status {status}", flush=True)


def load(folder: Path, tiny: bool) -> dict[str, Any]:
    """Seconds until a model is in its parts on the cards, and the peak of each card's memory after two steps."""
    settings = write_run(folder / "load", tiny, "llama3-70b", {"fsdp": 4}, max_steps=2)
    subprocess.run([sys.executable, "-m", "fastjax", "train", "--config", str(settings)], check=True)
    rows = events(settings.parent / "run")
    names = ("load_seconds", "compile_seconds", "first_step_seconds")
    return {name: rows["started"][name] for name in names} | {
        "memory_bytes_by_device": rows["finished"].get("memory_bytes_by_device")
    }


def killed(folder: Path, tiny: bool) -> dict[str, Any]:
    """Seconds from the death of a process to the end of the others, and the exit status of the whole."""
    settings = write_run(folder / "killed", tiny, "llama3.2-1b", {"data": 4}, max_steps=100_000, logging_steps=1)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS" or not tiny}
    command = [sys.executable, "-m", "fastjax", "launch", "-n", "4", "train", "--config", str(settings)]
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = settings.parent / "run" / "metrics.jsonl"
    while run.poll() is None and (not metrics.exists() or metrics.read_text().count('"loss"') < STEPS_BEFORE):
        time.sleep(0.5)
    if run.poll() is not None:
        sys.exit(f"the run ended by itself: {run.communicate()[1]}")
    ranks = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    os.kill(ranks[2], signal.SIGKILL)
    began = time.monotonic()
    try:
        said = run.communicate(timeout=MOST)[1]
    except subprocess.TimeoutExpired:
        run.kill()
        sys.exit(f"the others have not ended {MOST} seconds after a process was killed")
    alive = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    return {
        "seconds": time.monotonic() - began,
        "exit_status": run.returncode,
        "alive": alive,
        "said": said.splitlines()[-3:],
    }


def write_run(folder: Path, tiny: bool, preset: str, parallel: dict[str, int], **training: int) -> Path:
    """A model folder of a preset's shape with a tokenizer, rows of random words, and the settings of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = preset_config("tiny" if tiny else preset, None, "16bit")
    length = 64 if tiny else 4096
    if not (folder / "model").exists():
        write_model(folder / "model", config)
        names = ["<unk>", "<end>", "<pad>", *(f"w{number}" for number in range(3, config["vocab_size"]))]
        words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
        words.save(str(folder / "model" / "tokenizer.json"))
        special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
        (folder / "model" / "tokenizer_config.json").write_text(json.dumps(special))
    draw = np.random.default_rng(1)
    texts = (" ".join(f"w{n}" for n in draw.integers(3, config["vocab_size"], length - 8)) for _ in range(64))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {
        "model": {"model_name": str(folder / "model"), "max_seq_length": length, "load_in_4bit": True},
        "data": {"train": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache")},
        "training": {"per_device_train_batch_size": 1, **training},
        "parallel": parallel,
        "output": {"output_dir": str(folder / "run"), "overwrite_output_dir": True},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def events(run: Path) -> dict[str, dict[str, Any]]:
    """The rows of a run's metrics that tell an event, by its name."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["event"]: row for row in rows if "event" in row}


if __name__ == "__main__":
    main()
