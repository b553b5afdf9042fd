"""How fast and in how little memory model folders are merged and quantised, and what survives being killed.

python scripts/measure_convert.py --folder /tmp/convert --gb 8 --kills 20

The model is as large as asked for and sparse (zeros that take no room); its adapter is random. Rates are bytes of input
a second, beside the rate at which this machine writes as many bytes, syncs them and reads them back from the disk.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from convert.adapters import AdapterConfig, write_adapter
from convert.families import family_for
from fastjax.bench.model_folder import make_model

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHARD = 2**31
CHILD = """
import json, sys, time
from convert.merge import merge
from convert.quantize import quantize
what, source, adapter, out, shard = sys.argv[1:]
print("ready", flush=True)
begin = time.perf_counter()
options = {"max_shard_bytes": int(shard), "monitor": lambda done, total: None}
result = merge(source, adapter, out, **options).written if what == "merge" else quantize(source, out, **options)
print(json.dumps({"seconds": time.perf_counter() - begin, "kept": result.kept}), flush=True)
"""


def config_of(size: float) -> dict:
    """Of a model of about `size` bytes."""
    table = 2 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    one = {**CONFIG, "num_hidden_layers": 1}
    layer = sum(int(np.prod(spec.shape)) for spec in family_for(one).specs(one) if spec.path.layer is not None)
    return {**CONFIG, "num_hidden_layers": max(1, round((size / 2 - table) / layer))}


def make_adapter(folder: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    rng = np.random.default_rng(0)
    arrays = {}
    for spec in family_for(config).specs(config):
        if spec.path.part in PROJECTIONS:
            arrays[f"{spec.path.module}.lora_A"] = rng.standard_normal((16, spec.shape[1]), np.float32)
            arrays[f"{spec.path.module}.lora_B"] = rng.standard_normal((spec.shape[0], 16), np.float32)
    write_adapter(folder, AdapterConfig(r=16, target_modules=PROJECTIONS), arrays)


def disk_rate(folder: Path, size: int) -> float:
    """Bytes a second of writing, syncing, and reading back from the disk."""
    data, file = np.random.default_rng(0).integers(0, 256, 2**24, np.uint8), folder / "disk"
    begin = time.perf_counter()
    for start in range(0, size, SHARD):
        with open(file, "wb", buffering=0) as stream:
            for _ in range(min(SHARD, size - start) // data.nbytes):
                stream.write(data.data)
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(data.data):
                pass
    seconds = time.perf_counter() - begin
    file.unlink()
    return size / seconds


def start(what: str, folder: Path, out: Path, shard: int) -> subprocess.Popen:
    paths = [str(folder / "model"), str(folder / "adapter"), str(out), str(shard)]
    process = subprocess.Popen([sys.executable, "-c", CHILD, what, *paths], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def measure(what: str, folder: Path, shard: int) -> dict[str, float]:
    process = start(what, folder, folder / "out", shard)
    before = peak = anonymous(process.pid)
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.02)
    assert process.stdout is not None and process.returncode == 0
    found = json.loads(process.stdout.read())
    return {**found, "anonymous MB before": before / 1e6, "peak anonymous MB": peak / 1e6}


def digest(folder: Path) -> dict[str, str]:
    found = {}
    for file in sorted(folder.iterdir()):
        with open(file, "rb") as stream:
            found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def kill(what: str, folder: Path, kills: int, shard: int) -> None:
    """Kill it at random moments of its whole duration and resume; each result must equal the uninterrupted one."""
    draw = random.Random(0)
    out = folder / "out"
    seconds = measure(what, folder, shard)["seconds"]
    whole = digest(out)
    shutil.rmtree(out)
    done = resumed = 0
    while done < kills:
        process = start(what, folder, out, shard)
        try:
            process.wait(draw.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            done += 1
        if process.returncode == 0 or done == kills:
            last = start(what, folder, out, shard) if not out.exists() else process
            assert last.wait() == 0
            resumed += 1
        if out.exists():
            assert digest(out) == whole, "another result"
            shutil.rmtree(out)
        left = [path for path in folder.glob(".*") if path.name != ".out.converting"]
        assert not left, left
    print(f"{what}: {done} kills in {seconds:.1f} s long runs, {resumed} results, all equal to that without a kill")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="made and removed; needs three times the size")
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kill_gb", type=float, default=1.5)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    try:
        size = make_model(arguments.folder / "model", config_of(arguments.gb * 1e9), SHARD)
        make_adapter(arguments.folder / "adapter", arguments.folder / "model")
        for what in ("merge", "quantize"):
            rate = disk_rate(arguments.folder, size)
            found = measure(what, arguments.folder, SHARD)
            own = size / found["seconds"]
            print(
                f"{what}: {size / 1e9:.2f} GB in {found['seconds']:.1f} s: {own / 1e9:.3f} GB/s of input; this disk "
                f"{rate / 1e9:.3f} GB/s; ratio {own / min(rate, 0.5e9):.2f}; anonymous memory "
                f"{found['anonymous MB before']:.0f} MB before, {found['peak anonymous MB']:.0f} MB at most",
                flush=True,
            )
            shutil.rmtree(arguments.folder / "out")
        if arguments.kills:
            for name in ("model", "adapter"):
                shutil.rmtree(arguments.folder / name)
            make_model(arguments.folder / "model", config_of(arguments.kill_gb * 1e9), SHARD)
            make_adapter(arguments.folder / "adapter", arguments.folder / "model")
            for what in ("merge", "quantize"):
                kill(what, arguments.folder, arguments.kills // 2, 2**27)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
