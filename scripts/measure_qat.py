"""What quantisation-aware training wins back: full fine-tuning on GSM8K with and without it, quantised afterwards.

    python3 scripts/measure_qat.py --model FOLDER --data train.jsonl --output runs/qat [--scheme int4_weight_only]

FOLDER is SmolLM2-135M-Instruct in Hugging Face format, or another model with a chat template. The data are JSON lines
with `question` and `answer`, of which the last 500 are held out. Two runs, equal but for `training.qat`, and three
held-out losses: of the plain result, of the plain result with its layers' matrices quantised, of the other result
quantised. The share won back is the part of what quantisation costs the plain result that the other one does not pay.
"""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import jax

from fastjax.data import Batches
from fastjax.language_model import LanguageModel
from fastjax.runs.datasets import load_run_data
from fastjax.runs.fine_tune import fine_tune
from fastjax.runs.opening import open_model
from fastjax.runs.steps import run_loss
from fastjax.training.config import (
    DataSection,
    ModelSection,
    OptimizerConfig,
    OutputSection,
    ParallelSection,
    TrainConfig,
    TrainingSection,
)
from fastjax.training.config.qat import NAMED
from fastjax.training.loop import run_evaluation
from fastjax.training.step import make_eval_step

HELD_OUT = 500
ROWS = 8
"""Of a batch."""


def main() -> None:
    """Train twice, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scheme", choices=tuple(NAMED), default="int4_weight_only")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--max_steps", type=int)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    files = _write_data(arguments.data, arguments.output)
    losses = {}
    for name, qat in (("plain", None), ("qat", arguments.scheme)):
        config = _settings(arguments, files, name, qat)
        model = fine_tune(config).model
        losses[name] = held_out_loss(model, config)
        if qat is None:
            scheme = NAMED[arguments.scheme]
            quantized = model.with_fake_quantization(scheme.weights, scheme.activations)
            losses["plain, quantised"] = held_out_loss(quantized, config)
            del quantized
        del model
        gc.collect()
    cost, rest = losses["plain, quantised"] - losses["plain"], losses["qat"] - losses["plain"]
    print(f"held-out loss: plain {losses['plain']:.4f}; plain, quantised by {arguments.scheme} "
          f"{losses['plain, quantised']:.4f}; trained for it and quantised {losses['qat']:.4f}")  # fmt: skip
    print(f"quantisation costs {cost:.4f}, after training for it {rest:.4f}: {1 - rest / cost:.0%} won back")


def held_out_loss(model: LanguageModel, config: TrainConfig) -> float:
    """The mean cross-entropy of a model over a run's held-out rows.

    Args:
        model: any with the run's tokenizer.
        config: the run.
    """
    held_out = load_run_data(config, open_model(config).tokenizer, lambda text: None, 1).held_out
    assert held_out is not None, "every run here has held-out data"
    step = make_eval_step(model.graphdef, model.trainable_filter, loss=run_loss(config))
    batches = Batches(held_out.rows, ROWS, shuffle=False).epoch()
    return run_evaluation(step, model.trainable, model.frozen, batches, jax.device_put).loss


def _settings(arguments: argparse.Namespace, files: dict[str, Any], name: str, qat: Any) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(
            model_name=arguments.model, max_seq_length=1024, load_in_4bit=False, full_finetuning=True,
            use_gradient_checkpointing=False,
        ),
        data=DataSection(**files, cache_dir=str(arguments.output / "cache")),
        output=OutputSection(output_dir=str(arguments.output / name), overwrite_output_dir=True),
        optimizer=OptimizerConfig(learning_rate=arguments.learning_rate, lr_scheduler_type="cosine"),
        training=TrainingSection(
            per_device_train_batch_size=ROWS, num_train_epochs=arguments.epochs, max_steps=arguments.max_steps,
            logging_steps=50, qat=qat,
        ),
        parallel=ParallelSection(data=1, fsdp=1),
    )  # fmt: skip


def _write_data(data: Path, folder: Path) -> dict[str, Any]:
    lines = data.read_text(encoding="utf-8").splitlines()
    files = {}
    for name, part in (("train", lines[:-HELD_OUT]), ("eval", lines[-HELD_OUT:])):
        files[name] = str(folder / f"{name}.jsonl")
        with open(files[name], "w", encoding="utf-8") as file:
            for row in map(json.loads, part):
                turns = {"user": row["question"], "assistant": row["answer"]}
                messages = [{"role": role, "content": content} for role, content in turns.items()]
                file.write(json.dumps({"messages": messages}) + "\n")
    return files


if __name__ == "__main__":
    main()
