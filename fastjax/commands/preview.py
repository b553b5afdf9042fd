"""`fastjax preview`: the rows of a run as the model will see them, and statistics of the data. No JAX, no weights."""

import argparse
import math
from collections.abc import Sequence

from rich.console import Console

from convert.errors import shown
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError
from fastjax.limits import MAX_INTEGER
from fastjax.training.config import TrainConfig


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: the YAML file, overrides, and the number of rows.
    """
    parser = argparse.ArgumentParser(
        prog="fastjax preview",
        usage="fastjax preview CONFIG [--section.key value ...] [--rows N]",
        description="Show the first rows of a run as the model will see them, with what is learnt in colour, and what "
        "becomes of the data: lengths, slots filled, what is cut or left out, steps. A model or settings that `train` "
        "would refuse are refused first. It needs no GPU and reads no weights.",
        epilog="CONFIG and the overrides are those of `fastjax train`, whose --help lists every setting.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="rows to show (default: %(default)s)")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.rows < 0:
        raise ConfigError(f"--rows: expected 0 or more, got {shown(arguments.rows)}")
    if arguments.rows > MAX_INTEGER:
        raise ConfigError(f"--rows: expected at most {MAX_INTEGER}, got {shown(arguments.rows)}")
    if rest and not rest[0].startswith("-"):
        rest.insert(0, "--config")
    preview(parse_train_config(rest), arguments.rows, Console())


def preview(config: TrainConfig, num_rows: int, console: Console) -> None:
    """Show the data of a run.

    Args:
        config: the run.
        num_rows: rows to show of the training data and of the held-out data.
        console: the output.
    """
    from fastjax.data import Batches, Dataset, StreamedBatches, notes
    from fastjax.preview.render import counts, histogram, legend, mixture, show_row
    from fastjax.preview.view import first_rows, view_row
    from fastjax.runs.datasets import load_datasets, total_steps, train_batches
    from fastjax.runs.opening import open_model

    sizes = config.parallel.sizes
    replicas = math.prod(sizes.get(name, 1) for name in ("data", "fsdp", "expert"))
    tokenizer = open_model(config, weights=False).tokenizer
    with console.status("preparing the data") as status:
        train, held_out = load_datasets(config, tokenizer, status.update, replicas)
    batches = train_batches(config, train, replicas)
    steps, per_epoch = total_steps(config, batches), batches.steps_per_epoch
    sources = {"train": batches}
    if held_out is not None:
        sources["held out"] = Batches(held_out.rows, 1, shuffle=False)
    if num_rows:
        console.print(legend(console))
        for name, source in sources.items():
            for row in first_rows(source, num_rows):
                where = f"{name}, step {row.step}, row {row.place}" if name == "train" else name
                documents = view_row(row.tokens, row.targets, row.segment_ids, tokenizer, row.roles)
                console.print()
                console.print(show_row(documents, len(row.tokens), where, row.origin, console))
    known = {name: data for name, data in (("train", train), ("held out", held_out)) if isinstance(data, Dataset)}
    for name, dataset in known.items():
        console.print()
        console.print(
            histogram(dataset.rows.documents.lengths[dataset.rows.order], f"{name}: tokens in a document", console)
        )
    for name, dataset in known.items():
        shares = mixture(dataset, f"{name}: where the documents come from")
        if shares is not None:
            console.print()
            console.print(shares)
    if known:
        console.print()
        console.print(counts(known))
        for name, found in ((name, dataset.statistics) for name, dataset in known.items()):
            for kind, (count, first) in found.notes.items():
                words = f"{name}: {count:,} {notes.say(kind, found.special_tokens)} (first: {first})"
                console.print(words, highlight=False, markup=False, soft_wrap=True)
        console.print()
    size, parts = config.training.per_device_train_batch_size * replicas, config.training.gradient_accumulation_steps
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
    if {"data", "fsdp"} - set(sizes):
        sentence += "; several devices take as many rows each, in fewer steps (parallel)"
    console.print(sentence, highlight=False, soft_wrap=True)
