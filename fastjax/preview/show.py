"""The preview of a run's data: its first rows, what becomes of the data, and its steps."""

import math
from typing import TYPE_CHECKING

from rich.console import Console

from fastjax.data import Batches, Dataset, StreamedBatches, notes
from fastjax.preview.render import counts, histogram, legend, mixture, show_row
from fastjax.preview.view import first_rows
from fastjax.runs.datasets import RunData, load_run_data
from fastjax.runs.opening import open_model
from fastjax.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def preview(config: TrainConfig, num_rows: int, console: Console) -> None:
    """Show the data of a run.

    Args:
        config: the run.
        num_rows: rows to show of the training data and of the held-out data.
        console: the output.
    """
    sizes = {"context": 1, "tensor": 1} | config.parallel.sizes
    replicas = math.prod(sizes.get(name, 1) for name in ("data", "fsdp", "expert"))
    parts = sizes["tensor"] * (2 * sizes["context"] if sizes["context"] > 1 else 1)
    tokenizer = open_model(config, weights=False).tokenizer
    with console.status("preparing the data") as status:
        data = load_run_data(config, tokenizer, status.update, replicas, parts=parts)
    if num_rows:
        _show_rows(data, num_rows, tokenizer, console)
    named = {"train": data.train, "held out": data.held_out}
    known = {name: dataset for name, dataset in named.items() if isinstance(dataset, Dataset)}
    if known:
        _show_figures(known, console)
    console.print(_steps(config, data, replicas), highlight=False, soft_wrap=True)


def _show_rows(data: RunData, count: int, tokenizer: "PreTrainedTokenizerFast", console: Console) -> None:
    """Show the first rows of each data set."""
    sources = {"train": data.batches}
    if data.held_out is not None:
        sources["held out"] = Batches(data.held_out.rows, 1, shuffle=False)
    console.print(legend(console))
    for name, source in sources.items():
        for row in first_rows(source, count, tokenizer):
            where = f"{name}, step {row.step}, row {row.place}" if name == "train" else name
            console.print()
            console.print(show_row(row.documents, row.slots, where, row.origin, console))


def _show_figures(known: dict[str, Dataset], console: Console) -> None:
    """Show what becomes of the data sets: lengths, shares of a mixture, counts, and what was noted."""
    for name, dataset in known.items():
        lengths = dataset.rows.documents.lengths[dataset.rows.order]
        console.print()
        console.print(histogram(lengths, f"{name}: tokens in a document", console))
    for name, dataset in known.items():
        shares = mixture(dataset, f"{name}: where the documents come from")
        if shares is not None:
            console.print()
            console.print(shares)
    console.print()
    console.print(counts(known))
    for name, dataset in known.items():
        statistics = dataset.statistics
        for kind, (count, first) in statistics.notes.items():
            words = f"{name}: {count:,} {notes.say(kind, statistics.special_tokens)} (first: {first})"
            console.print(words, highlight=False, markup=False, soft_wrap=True)
    console.print()


def _steps(config: TrainConfig, data: RunData, replicas: int) -> str:
    """The rows of a step and the steps of the run, in words."""
    size, parts = config.training.per_device_train_batch_size * replicas, config.training.gradient_accumulation_steps
    train, steps, per_epoch = data.train, data.total_steps, data.batches.steps_per_epoch
    sentence = f"{f'{parts} × ' if parts > 1 else ''}{size} rows a step"
    if isinstance(train, Dataset) and per_epoch is not None:
        tokens = train.statistics.tokens / per_epoch
        sentence += f", {tokens:,.0f} tokens on average; {per_epoch:,} steps an epoch, {steps:,} steps in all"
        sentence += f" ({steps / per_epoch:.3g} epoch{'s' * (steps != per_epoch)})"
    else:
        sentence += f"; {steps:,} steps of streamed data, whose number is not known"
        if isinstance(train, StreamedBatches):
            for kind, (count, first) in train.notes.items():
                words = notes.say(kind, config.data.special_tokens)
                sentence += f"; {count:,} of the first {train.counts.examples:,} examples {words} (first: {first})"
    sentence += f"; rows of a batch: {data.row_lengths}"
    if {"data", "fsdp"} - set(config.parallel.sizes):
        sentence += "; several devices take as many rows each, in fewer steps (parallel)"
    return sentence
