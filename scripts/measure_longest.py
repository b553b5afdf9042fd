"""Train the longest rows under limits of the device's memory, each in a process of its own.

    python scripts/measure_longest.py                the table below, 8B and 70B at rank 32
    python scripts/measure_longest.py 24             only the rows under that limit

The limit is that of JAX's allocator, in GB of 10⁹ bytes; the table of embeddings lies in the host's memory, of which a
row takes what the last column of the result says. Of the seconds, those of the first and the last step, the first
include pinning that memory. A row passes where every step's loss and gradients are finite.
"""

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of one batch.

    Attributes:
        gigabytes: the limit.
        preset: as of `fastjax bench step`.
        tokens: of the row.
        checkpointing: the policy.
        steps: to take.
        mlp_chunk: tokens that an MLP computes at a time; None: "auto".
        optimizer: its name.
    """

    gigabytes: int
    preset: str
    tokens: int
    checkpointing: str
    steps: int
    mlp_chunk: int | None = None
    optimizer: str = "adamw"


ROWS = (
    Row(8, "llama3-8b", 3_968, "offload", 10, mlp_chunk=512),
    Row(16, "llama3-8b", 53_248, "offload_attention", 10),
    Row(24, "llama3-8b", 102_144, "offload_attention", 10),
    Row(48, "llama3-8b", 249_344, "offload_attention", 2),
    Row(80, "llama3-8b", 342_784, "offload", 1),
    Row(48, "llama3-70b", 14_592, "offload", 2, mlp_chunk=1024, optimizer="adamw_8bit"),
)
_RANKS = {"llama3-8b": 32, "llama3-70b": 32}
#: Bytes of the host's memory that JAX may pin beyond a row's residuals: it takes pieces of powers of two up to there.
_SPARE = 4 * 2**30


def run(row: Row) -> None:
    """Build, compile, step; figures as a line of JSON."""
    import jax

    from fastjax.bench.step import presets
    from fastjax.bench.step.build import build_model, first_state, make_batch
    from fastjax.bench.step.case import StepCase
    from fastjax.training.optimizers import OptimizerConfig, make_optimizer
    from fastjax.training.step import make_train_step

    presets.PRESETS[row.preset]["max_position_embeddings"] = max(131_072, row.tokens)
    layout = {"batch": 1, "seq": row.tokens, "checkpointing": row.checkpointing, "layer_loop": "scan"}
    options = {"rank": _RANKS[row.preset], "mlp_chunk": row.mlp_chunk, "optimizer": row.optimizer}
    case = StepCase(preset=row.preset, **layout, **options, offload_embedding=True)
    model = build_model(case)
    optimizer = make_optimizer(OptimizerConfig(name=case.optimizer, learning_rate=1e-4), row.steps)  # pyright: ignore[reportArgumentType]
    state, batch = first_state(model, optimizer), make_batch(case, model.config.vocab_size, None)
    frozen, step = model.frozen, make_train_step(model.graphdef, optimizer, model.trainable_filter)
    del model
    gc.collect()
    compiled, steps = step.lower(state, frozen, batch).compile(), []
    for _ in range(row.steps):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, frozen, batch))
        found = {"seconds": time.perf_counter() - begin, "loss": float(metrics["loss"])}
        steps.append(found | {"finite": bool(metrics["finite"])})
    stats, memory = jax.devices()[0].memory_stats(), compiled.memory_analysis()
    figures = {
        "limit": stats["bytes_limit"],
        "peak": stats["peak_bytes_in_use"],
        "host": memory.host_temp_size_in_bytes,
    }
    print(json.dumps(figures | {"steps": steps, "device": jax.devices()[0].device_kind}), flush=True)


def environment(row: Row) -> dict[str, str]:
    """That of a row's process: the limits of the device's memory and of the host's."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    total = int(subprocess.run(query, check=True, capture_output=True, text=True).stdout) * 2**20
    layers, width = (32, 4096) if row.preset == "llama3-8b" else (80, 8192)
    arrays = 2 if row.checkpointing == "offload_attention" else 1
    host = arrays * 2 * width * layers * row.tokens + _SPARE
    return os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(row.gigabytes * 1e9 / total),
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(max(64, -(-host // 2**30))),
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gigabytes", nargs="*", type=int, help="limits (default: all)")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        run(ROWS[arguments.row])
        return 0
    failed = False
    print("| limit | model | tokens | policy | steps, finite | seconds each | peak | host |\n" + "| --- " * 8 + "|")
    for number, row in enumerate(ROWS):
        if arguments.gigabytes and row.gigabytes not in arguments.gigabytes:
            continue
        command = [sys.executable, __file__, "--row", str(number)]
        done = subprocess.run(command, env=environment(row), stdout=subprocess.PIPE, text=True)
        start = f"| {row.gigabytes} GB | {row.preset} | {row.tokens:,} | `{row.checkpointing}` |"
        if done.returncode:
            print(f"{start} failed, see above |", flush=True)
            failed = True
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        seconds = ", ".join(f"{one['seconds']:.1f}" for one in (found["steps"][0], found["steps"][-1]))
        finite = sum(one["finite"] for one in found["steps"])
        failed |= finite < row.steps
        sizes = f"{found['peak'] / 1e9:.2f} GB | {found['host'] / 1e9:.1f} GB |"
        print(f"{start} {row.steps}, {finite} | {seconds} | {sizes}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
