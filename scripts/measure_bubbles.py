"""The share of a run's time in which some kernel runs, on a real data set: a trace of fifty steps in a row.

    python scripts/measure_bubbles.py --data train.jsonl --tokenizer FOLDER --output runs/bubbles

The shape of Llama 3 8B in NF4 with random weights, rank 16, packed rows, projections kept, unrolled: a run of `Trainer`
with metrics, checkpoints and a callback that traces. The data are JSON lines with `question` and `answer`.
"""

import argparse
from pathlib import Path

import jax
from transformers import AutoTokenizer

from fastjax import Event, OptimizerConfig, OutputSection, Trainer, TrainerSettings, TrainingSection
from fastjax.bench.step.build import build_model
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.profile import summarize
from fastjax.bench.trace import read_kernels

#: Steps before the trace.
_BEFORE = 10


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layer_loop", default="unroll", choices=("scan", "unroll"))
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    case = StepCase(arguments.preset, arguments.batch, arguments.seq, "projections", arguments.layer_loop)
    folder = arguments.output / "trace"

    def traced(event: Event) -> None:
        if event.name == "step" and event.step == _BEFORE:
            jax.profiler.start_trace(str(folder))
        if event.name == "step" and event.step == _BEFORE + arguments.steps:
            jax.profiler.stop_trace()

    output = OutputSection(str(arguments.output / "run"), overwrite_output_dir=True)
    length = _BEFORE + arguments.steps + 2
    training = TrainingSection(per_device_train_batch_size=arguments.batch, max_steps=length, num_train_epochs=100.0)
    columns = {"prompt": "question", "completion": "answer"}
    settings = TrainerSettings(output, training, OptimizerConfig(), columns=columns, loss_on="all")
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    Trainer(build_model(case), tokenizer, str(arguments.data), settings=settings, callbacks=[traced]).train()
    profile = summarize(read_kernels(folder), arguments.steps, {})
    if profile is None:
        raise SystemExit("the trace has no kernels of a GPU")
    print(f"{arguments.steps} steps of {profile.step_milliseconds:.1f} ms; kernels run {profile.busy:.2%} of the time")


if __name__ == "__main__":
    main()
