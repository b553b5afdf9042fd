"""How long a model folder takes to become a 4-bit model on the device, and how much of the host's memory.

python scripts/measure_load.py --folder /tmp/load

The shape of Llama 3 8B in bfloat16, 16 GB of normal values, read before so that the page cache is warm. The time is
that of `FastLanguageModel.from_pretrained(folder, load_in_4bit=True)` in a process of its own, until every array is
on the device; the memory is anonymous, without the mapped files' pages.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from measure_convert import anonymous
from tokenizers import Tokenizer, models

from fastjax.bench.model_folder import make_model
from fastjax.bench.step.presets import PRESETS, preset_config

CHILD = """
import json, sys, time
import jax
from fastjax import FastLanguageModel
jax.block_until_ready(jax.numpy.zeros(1))
print("ready", flush=True)
begin = time.perf_counter()
model, _ = FastLanguageModel.from_pretrained(sys.argv[1], load_in_4bit=True)
jax.block_until_ready((model.frozen, model.trainable))
print(json.dumps({"seconds": time.perf_counter() - begin, "device": jax.devices()[0].device_kind}), flush=True)
"""


def warm(folder: Path) -> float:
    """Seconds to read every file."""
    begin = time.perf_counter()
    buffer = bytearray(2**24)
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - begin


def measure(folder: Path) -> dict:
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    before = peak = anonymous(process.pid)
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.02)
    if process.returncode:
        sys.exit(process.returncode)
    return {**json.loads(process.stdout.read()), "before": before, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="made and removed")
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    base = preset_config(arguments.preset, arguments.layers, "16bit")
    config = {**base, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    try:
        fill = (0.02 * np.random.default_rng(0).standard_normal(2**25, np.float32)).astype(ml_dtypes.bfloat16)
        size = make_model(arguments.folder, config, 5 * 2**30, fill)
        words = {f"w{number}": number for number in range(config["vocab_size"])}
        Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(arguments.folder / "tokenizer.json"))
        print(f"{size / 1e9:.1f} GB, read in {warm(arguments.folder):.1f} s, then in {warm(arguments.folder):.1f} s")
        for _ in range(arguments.rounds):
            found = measure(arguments.folder)
            seconds, rate = found["seconds"], size / found["seconds"] / 1e9
            print(
                f"{found['device']}: {seconds:.1f} s, {rate:.2f} GB/s; anonymous memory {found['before'] / 1e9:.2f} GB "
                f"before, {found['peak'] / 1e9:.2f} GB at most",
                flush=True,
            )
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
