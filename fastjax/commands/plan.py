"""`fastjax plan`: memory and speed of a run on a GPU, from its settings, compiled on a machine that may have none."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from convert.errors import shorten
from convert.files import atomic_file
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError
from fastjax.training.config import TrainConfig

if TYPE_CHECKING:
    from fastjax.planning.device import Device
    from fastjax.runs.plan import Planned


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: the YAML file, overrides, and the options of the plan.
    """
    parser = argparse.ArgumentParser(
        prog="fastjax plan",
        usage="fastjax plan CONFIG [--section.key value ...] [--gpu NAME] [--memory GB] [--checkpointing NAME ...] "
        "[--output FILE]",
        description="Compile the train step of a run for a GPU with each policy of gradient checkpointing, and show "
        "what memory it takes, on the device and on the host, and about how fast it is. It reads config.json and the "
        "headers of the weights, no weights and no data, and needs no GPU.",
        epilog="CONFIG and the overrides are those of `fastjax train`, whose --help lists every setting. The time is "
        "an estimate by the roofline, of full rows.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", metavar="NAME", help="h200, a100-80, 4090, t4, ... (default: this machine's)")
    parser.add_argument(
        "--memory", metavar="GB", help="that the run may take, in 10^9 bytes (default: JAX's share of the GPU's)"
    )
    parser.add_argument("--checkpointing", nargs="+", metavar="NAME", help="policies (default: all to choose from)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan as JSON")
    arguments, rest = parser.parse_known_args(argv)
    limit = None if arguments.memory is None else _bytes(arguments.memory)
    if rest and not rest[0].startswith("-"):
        rest.insert(0, "--config")
    plan(parse_train_config(rest), arguments.gpu, limit, arguments.checkpointing, arguments.output, Console())


def plan(
    config: TrainConfig,
    gpu: str | None,
    limit: float | None,
    policies: Sequence[str] | None,
    output: Path | None,
    console: Console,
) -> None:
    """Show the plan of a run.

    Args:
        config: the run.
        gpu: a name in `planning.cards.CARDS`; None: this machine's GPU.
        limit: bytes that the run may take; None: what JAX's allocator takes.
        policies: of rematerialisation; None: those to choose from.
        output: JSON file; None: none.
        console: for the table.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of every program that does not fit
    import jax

    if gpu is not None:
        jax.config.update("jax_platforms", "cpu")  # shapes are traced, and nothing runs
    from fastjax.models.remat import check_policy
    from fastjax.runs.opening import open_shapes
    from fastjax.runs.plan import fastest, plan_run

    for name in policies or ():
        check_policy(name)
    device = _device(gpu)
    opened = open_shapes(config)
    if limit is None:
        limit = _share(device, gpu)
    with console.status("opening the model") as status:
        planned = plan_run(config, opened, device, policies, limit, status.update)
    best = fastest(planned, limit)
    _show(console, config, device, planned, limit, best)
    if output is not None:
        with atomic_file(output) as file:
            file.write((json.dumps(_content(device, planned, limit, best), indent=1) + "\n").encode())
        console.print(f"written to {output}", highlight=False, soft_wrap=True)


def _bytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise ConfigError(f"--memory: expected a number of GB greater than 0, got {shorten(text, 80)}")
    return number * 1e9


def _device(gpu: str | None) -> "Device":
    import jax

    from fastjax.planning.cards import CARDS
    from fastjax.planning.device import Elsewhere, Here

    if gpu is not None:
        return Elsewhere(gpu)
    if jax.default_backend() != "gpu":
        raise ConfigError(f"--gpu: expected one of {', '.join(CARDS)}, since JAX sees no GPU on this machine")
    return Here()


def _share(device: "Device", gpu: str | None) -> float:
    """The bytes that JAX's allocator takes."""
    import jax

    from fastjax.planning.cards import ALLOCATOR_SHARE
    from fastjax.planning.device import memory_limit

    here = memory_limit(jax.devices()[0].memory_stats()) if gpu is None else None
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ALLOCATOR_SHARE))
    return here or share * device.card.memory_bytes


def _show(
    console: Console,
    config: TrainConfig,
    device: "Device",
    planned: "Sequence[Planned]",
    limit: float,
    best: "Planned | None",
) -> None:
    from rich import box
    from rich.table import Table

    card, training = device.card, config.training
    rows = f"{training.per_device_train_batch_size}×{config.model.max_seq_length}"
    if training.gradient_accumulation_steps > 1:
        rows = f"{training.gradient_accumulation_steps}×{rows}"
    name = Path(config.model.model_name).name
    title = f"{name} · {rows} tokens · {config.model.layer_loop} · {card.device_kind} · memory in GB"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("checkpointing", no_wrap=True)
    for title in ("held", "step", "in all", "host", "again", "ms", "tokens/s", "fits"):
        table.add_column(title, justify="right")
    for one in planned:
        memory = one.memory
        cells = (memory.arguments, memory.temporaries, memory.device, memory.host)
        table.add_row(
            one.policy,
            *(f"{count / 1e9:.2f}" for count in cells),
            f"{one.recomputed / one.flops:.0%}",
            f"{one.seconds * 1e3:,.0f}",
            f"{one.tokens_per_second:,.0f}",
            "yes" if one.fits(limit) else "no",
            style="bold" if one is best else None,
        )
    console.print(table)
    share = f"{limit / 1e9:.1f} GB of the card's {card.memory_bytes / 1e9:.1f}"
    if best is None:
        least = min(planned, key=lambda one: one.memory.device)
        sentence = (
            f"nothing fits in {share}: {least.policy} needs {least.memory.device / 1e9:.1f} GB. Lower "
            "training.per_device_train_batch_size (and raise gradient_accumulation_steps as much) or "
            "model.max_seq_length"
        )
    else:
        sentence = f"fits in {share}, about the fastest: model.use_gradient_checkpointing: {best.policy}"
    console.print(f"{sentence}.", highlight=False, soft_wrap=True)
    console.print(
        "held: weights, state and batch; step: beside these; in all: with what the allocator adds; again: recomputed "
        "FLOPs beside the model's; ms: an estimate.",
        highlight=False,
        soft_wrap=True,
    )


def _content(device: "Device", planned: "Sequence[Planned]", limit: float, best: "Planned | None") -> dict[str, Any]:
    return {
        "gpu": device.card.device_kind,
        "memory_limit": int(limit),
        "chosen": None if best is None else best.policy,
        "policies": [
            {
                "policy": one.policy,
                "fits": one.fits(limit),
                "device_bytes": one.memory.device,
                "argument_bytes": one.memory.arguments,
                "temporary_bytes": one.memory.temporaries,
                "host_bytes": one.memory.host,
                "model_flops": one.flops,
                "recomputed_flops": one.recomputed,
                "step_seconds": one.seconds,
                "tokens_per_second": one.tokens_per_second,
            }
            for one in planned
        ],
    }
