"""What the trainer costs beside its steps: a run with everything on, the same run bare, and the step alone.

A Llama of 114 million parameters with random weights is fine-tuned whole on packed rows of 2,048 tokens. Measured are:

- the step alone: batches on the device, nothing read, nothing saved; and in which part of it some kernel ran, by a
  profile of ten steps;
- a bare run: one line of metrics a step, no checkpoint, no tracker;
- a run with everything on: checkpoints, TensorBoard, evaluation. The time of a step is that between two rows of its
  metrics, without the steps beside an evaluation; the utilisation is what nvidia-smi says ten times a second from the
  tenth step to the last, evaluations and checkpoints included;
- with --deterministic: the bare run with deterministic operations, twice, and whether the two are equal bit for bit.

    python3 scripts/measure_trainer.py --data train.jsonl --tokenizer FOLDER --output runs/measure

The data are JSON lines with `messages`, or with `question` and `answer`.
"""

import argparse
import glob
import json
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import jax
from compare_methods import in_process, make_base, split

from fastjax.training import config as sections


def settings(arguments: argparse.Namespace, name: str, **changes) -> sections.TrainConfig:
    """The run `name`, with changes to the sections `training` and `output`."""
    folder = arguments.output
    return sections.TrainConfig(
        model=sections.ModelSection(
            str(folder / "base"),
            2048,
            load_in_4bit=False,
            full_finetuning=True,
            use_gradient_checkpointing=False,
            dtype=arguments.dtype,
        ),
        data=sections.DataSection(
            str(folder / "first.jsonl"), str(folder / "held_out.jsonl"), loss_on="all", cache_dir=str(folder / "cache")
        ),
        optimizer=sections.OptimizerConfig(
            name=arguments.optimizer, learning_rate=6e-4, warmup_ratio=0.05, weight_decay=0.01
        ),
        training=sections.TrainingSection(
            **{"per_device_train_batch_size": arguments.batch, "max_steps": arguments.steps, "logging_steps": 100}
            | changes.get("training", {})
        ),
        output=sections.OutputSection(str(folder / name), overwrite_output_dir=True, **changes.get("output", {})),
    )


def step_alone(config: sections.TrainConfig, steps: int = 60) -> dict:
    """Median seconds of a step with batches on the device, in groups of ten that end idle; and the busy share."""
    from fastjax.language_model import FastLanguageModel
    from fastjax.runs.datasets import load_run_data
    from fastjax.runs.opening import open_model
    from fastjax.training.optimizers import make_optimizer
    from fastjax.training.step import init_state, make_train_step

    data = load_run_data(config, open_model(config).tokenizer)
    model, _ = FastLanguageModel.from_pretrained(config.model.model_name, 2048, config.model.dtype, False, True, False)
    optimizer = make_optimizer(config.optimizer, data.total_steps)
    step = make_train_step(model.graphdef, optimizer, model.trainable_filter)
    state = init_state(model.trainable, optimizer, jax.random.key(0))
    model = model.replace(trainable=None)
    batches = [jax.device_put(batch) for batch in data.batches.from_step(0, 10)]
    seconds = []
    for _ in range(steps // 10):
        start = time.perf_counter()
        for batch in batches:
            state, metrics = step(state, model.frozen, batch)
        jax.block_until_ready((state, metrics))
        seconds.append((time.perf_counter() - start) / len(batches))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for batch in batches:
                state, metrics = step(state, model.frozen, batch)
            jax.block_until_ready((state, metrics))
        part = busy(folder)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    return {"step_seconds": statistics.median(seconds[1:]), "busy": part, "memory_gib": peak}


def timed_run(config: sections.TrainConfig) -> dict:
    """Run; the times between its metrics' rows, and nvidia-smi's utilisation of the device."""
    from fastjax.runs.fine_tune import fine_tune

    metrics, samples = Path(config.output.output_dir) / "metrics.jsonl", []
    metrics.unlink(missing_ok=True)
    threading.Thread(target=_sample, args=(metrics, config.training.max_steps, samples), daemon=True).start()
    result = fine_tune(config)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    looked = {row["step"] for row in rows if "eval_loss" in row}
    gaps = {
        after["step"]: after["seconds"] - before["seconds"]
        for before, after in zip(steps, steps[1:], strict=False)
        if before["step"] not in looked and after["step"] not in looked and after["step"] > 3
    }
    found = {
        "mean_step_seconds": statistics.fmean(gaps.values()),
        "median_step_seconds": statistics.median(gaps.values()),
        "tokens_per_second": statistics.fmean(row["num_tokens"] for row in steps) / statistics.fmean(gaps.values()),
        "mfu": steps[-1]["model_flops_utilization"],
        "memory_gib": (steps[-1]["memory_bytes"] or 0) / 2**30,
        "saved": sum(row.get("event") == "saved" for row in rows),
        "final_loss": steps[-1]["loss"],
        "eval_loss": result.evaluation.loss if result.evaluation else None,
        "losses": [row["loss"] for row in steps],
        "slowest": sorted(((round(gap, 4), step) for step, gap in gaps.items()), reverse=True)[:5],
    }
    found["utilization"] = statistics.fmean(samples) / 100
    found["samples"] = len(samples)
    return found


def _sample(metrics: Path, steps: int, samples: list[int]) -> None:
    """The utilisation of the device from the tenth step's row to the last's."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=100"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text = metrics.read_text() if metrics.exists() else ""
            if f'"step": {steps}, "loss"' in text:
                break
            if '"step": 10, "loss"' in text:
                samples.append(int(line))
        process.terminate()


def busy(trace: str) -> float:
    """Share of the time between a profile's first and last kernel with a running kernel, copies not counted."""
    (file,) = glob.glob(f"{trace}/**/*.xplane.pb", recursive=True)
    spans = []
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    kernels = (event for event in line.events if not event.name.lower().startswith("memcpy"))
                    spans += [(kernel.start_ns, kernel.start_ns + kernel.duration_ns) for kernel in kernels]
    spans.sort()
    covered, end = 0.0, spans[0][0]
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered / (end - spans[0][0])


def measure(name: str, arguments: argparse.Namespace) -> dict:
    """One of the measurements, in a process of its own."""
    on = {"save_steps": arguments.save_steps, "report_to": ["tensorboard"]}
    if name == "alone":
        return step_alone(settings(arguments, name))
    if name == "bare":
        return timed_run(settings(arguments, name))
    if name == "everything":
        return timed_run(settings(arguments, name, output=on, training={"eval_steps": arguments.save_steps}))
    return timed_run(settings(arguments, "deterministic", training={"deterministic": True, "max_steps": 60}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16, help="rows of 2,048 tokens a step")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--optimizer", default="adamw", help="as optimizer.name")
    parser.add_argument("--deterministic", action="store_true")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    split(arguments.data, arguments.output, 400)
    in_process(make_base, arguments.tokenizer, str(arguments.output / "base"))
    names = ["alone", "bare", "everything"] + [
        "deterministic",
        "deterministic again",
    ] * arguments.deterministic
    found = {name: in_process(measure, name, arguments) for name in names}
    (arguments.output / "measured.json").write_text(json.dumps(found, indent=1))
    alone, bare, everything = (found[name] for name in names[:3])
    print(f"step alone               {alone['step_seconds'] * 1e3:8.2f} ms, {alone['memory_gib']:.2f} GiB")
    for name in names[1:]:
        run = found[name]
        print(
            f"{name:24} {run['mean_step_seconds'] * 1e3:8.2f} ms (median {run['median_step_seconds'] * 1e3:.2f}), "
            f"{run['tokens_per_second']:,.0f} tokens/s, loss {run['final_loss']:.4f}, {run['memory_gib']:.1f} GiB, "
            f"{run['saved']} checkpoints, slowest {run['slowest'][:3]}"
        )
    print(f"the loop costs           {bare['mean_step_seconds'] / alone['step_seconds'] - 1:8.2%} over the step alone")
    print(f"logging and checkpoints  {everything['mean_step_seconds'] / bare['mean_step_seconds'] - 1:8.2%} over bare")
    print(f"kernels run              {alone['busy']:8.2%} of the step alone")
    for name in ("bare", "everything"):
        run = found[name]
        print(f"nvidia-smi says          {run['utilization']:8.2%} of the run {name}, {run['samples']} samples")
    if arguments.deterministic:
        first, second = (found[name] for name in names[3:])
        equal = first["losses"] == second["losses"]
        cost = first["median_step_seconds"] / bare["median_step_seconds"] - 1
        print(f"deterministic costs      {cost:8.2%} over bare; two runs equal: {equal}")


if __name__ == "__main__":
    main()
