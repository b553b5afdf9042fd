"""`fastjax quickstart`: QLoRA on the embedded tiny model, with its answers before and after."""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastjax.errors import Interrupted
from fastjax.training.config import (
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerConfig,
    OutputSection,
    ParallelSection,
    TrainConfig,
    TrainingSection,
)

ASSETS = Path(__file__).parent.parent / "assets"
"""The embedded model and data set."""


class Scored(NamedTuple):
    """A model's answers to the held-out prompts.

    Attributes:
        answers: in the order of the prompts.
        exact: number of answers equal to the expected ones.
    """

    answers: list[str]
    exact: int


def quickstart_config(output_dir: str) -> TrainConfig:
    """The settings of the run, those of examples/quickstart.yaml.

    Args:
        output_dir: folder of the run; an earlier run there is replaced.
    """
    return TrainConfig(
        model=ModelSection(str(ASSETS / "tiny-llama"), max_seq_length=256, use_gradient_checkpointing="none"),
        lora=LoraSection(r=16, lora_alpha=32),
        data=DataSection(str(ASSETS / "tiny-chat/train.jsonl"), str(ASSETS / "tiny-chat/test.jsonl")),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_ratio=0.05),
        training=TrainingSection(
            per_device_train_batch_size=8,
            num_train_epochs=2,
            logging_steps=10,
            eval_steps=10,
            early_stopping_patience=1,
            early_stopping_threshold=0.005,
        ),
        output=OutputSection(output_dir, overwrite_output_dir=True, sample_answers=5),
        parallel=ParallelSection(data=1, fsdp=1),  # so little is no faster on more
    )


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: its arguments.
    """
    parser = argparse.ArgumentParser(
        prog="fastjax quickstart",
        description="Fine-tune the embedded tiny Llama with QLoRA and show its answers before and after. It takes a "
        "minute on two CPU cores and reads nothing from the network.",
    )
    parser.add_argument("--output_dir", default="runs/quickstart", metavar="FOLDER", help="default: %(default)s")
    run(quickstart_config(parser.parse_args(argv).output_dir), Console())


def run(config: TrainConfig, console: Console) -> tuple[Scored, Scored]:
    """Answer, fine-tune, answer again, and show both.

    Args:
        config: the run; its held-out file has the prompts and the expected answers.
        console: the output.

    Returns:
        The answers before and after.
    """
    from fastjax.data import read_jsonl
    from fastjax.language_model import FastLanguageModel
    from fastjax.runs.fine_tune import fine_tune

    assert isinstance(config.data.eval, str)
    conversations = [record.messages for record in read_jsonl(config.data.eval)]  # pyright: ignore
    prompts = [messages[0]["content"] for messages in conversations]
    expected = [messages[-1]["content"] for messages in conversations]
    base, _ = FastLanguageModel.from_pretrained(config.model.model_name, config.model.max_seq_length)
    with _status(console, f"asking the base model {len(prompts)} held-out prompts"):
        before = _score(base, prompts, expected)
    try:
        tuned = fine_tune(config, console)
    except Interrupted as error:
        settings = shlex.quote(f"{config.output.output_dir}/config.yaml")
        raise Interrupted(f"{error}: fastjax train {settings} --resume", error.signal_number) from None
    with _status(console, "asking the fine-tuned model the same"):
        after = _score(tuned.model, prompts, expected)
    _show(console, prompts, expected, before, after)
    output, asked = shlex.quote(config.output.output_dir), shlex.quote(prompts[0])
    report = tuned.folder.parent / "report.html"
    console.print(
        f"The adapter is in {tuned.folder} (PEFT format), curves and answers in {report}.\n"
        f"Talk to it, and ask it such as {asked}:\n  fastjax chat {output}",
        highlight=False,
        soft_wrap=True,
    )
    return before, after


def _status(console: Console, doing: str) -> AbstractContextManager[Any]:
    """A spinner on a terminal; a line elsewhere, where a spinner says nothing."""
    if not console.is_terminal:
        console.print(f"{doing} …", highlight=False)
    return console.status(doing)


def _score(model, prompts: Sequence[str], expected: Sequence[str]) -> Scored:
    from fastjax.generation.text import answer

    answers = answer(model, prompts, max_new_tokens=max(map(len, expected)) + 8)
    return Scored(answers, sum(a.strip() == e.strip() for a, e in zip(answers, expected, strict=True)))


def _show(
    console: Console, prompts: Sequence[str], expected: Sequence[str], before: Scored, after: Scored, shown: int = 3
) -> None:
    """Show the first held-out prompts with all answers, and the number of right ones."""
    table = Table.grid(padding=(0, 2))
    for answers in list(zip(prompts, expected, before.answers, after.answers, strict=True))[:shown]:
        table.add_row()
        for name, text in zip(("prompt", "expected", "before", "after"), answers, strict=True):
            table.add_row(f" {name}", Text(text if len(text) <= 200 else f"{text[:197]}..."))
    console.print(table)
    console.print(
        f"\nexact match on {len(prompts)} held-out prompts: before {before.exact / len(prompts):.1%}, "
        f"after {after.exact / len(prompts):.1%}",
        highlight=False,
    )
