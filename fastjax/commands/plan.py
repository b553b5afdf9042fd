"""`fastjax plan`: memory and speed of a run on a GPU, from its settings, compiled on a machine that may have none."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from convert.errors import shorten
from convert.files import atomic_file
from fastjax.commands import plan_tables
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError
from fastjax.training.config import TrainConfig

if TYPE_CHECKING:
    from fastjax.planning.device import Device


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: the YAML file, overrides, and the options of the plan.
    """
    parser = argparse.ArgumentParser(
        prog="fastjax plan",
        usage="fastjax plan FILE [--section.key value ...] [--gpu NAME] [--gpus N] [--memory GB] "
        "[--host_memory GB] [--checkpointing NAME ...] [--longest] [--output FILE]",
        description="Compile the train step of a run for a GPU with each policy of gradient checkpointing, and show "
        "what memory it takes, on the device and on the host, and about how fast it is. It reads config.json and the "
        "headers of the weights, no weights and no data, and needs no GPU.",
        epilog="FILE and the overrides are those of `fastjax train`, whose --help lists every setting. The time is "
        "an estimate by the roofline, of full rows.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", metavar="NAME", help="h200, a100-80, 4090, t4, ... (default: this machine's)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="of one host (default: %(default)s)")
    parser.add_argument(
        "--memory", metavar="GB", help="that the run may take, in 10^9 bytes (default: JAX's share of the GPU's)"
    )
    parser.add_argument(
        "--host_memory",
        metavar="GB",
        help="of the host that the run may take (default: this machine's; 128 for a GPU named with --gpu)",
    )
    parser.add_argument(
        "--longest",
        action="store_true",
        help="search for the longest rows that fit, in place of model.max_seq_length",
    )
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        metavar="NAME",
        help="policies (default: all to choose from; with --longest full, offload, offload_attention)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan as JSON")
    arguments, rest = parser.parse_known_args(argv)
    arguments.memory = _bytes("--memory", arguments.memory)
    arguments.host_memory = _bytes("--host_memory", arguments.host_memory)
    if arguments.gpus < 1:
        raise ConfigError(f"--gpus: expected at least 1, got {arguments.gpus}")
    _plan(parse_train_config(rest), arguments, Console())


def _plan(config: TrainConfig, arguments: argparse.Namespace, console: Console) -> None:
    """Show the plan of a run."""
    gpu, gpus, policies = arguments.gpu, arguments.gpus, arguments.checkpointing
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA writes of every program that does not fit
    import jax

    if gpu is not None:
        jax.config.update("jax_platforms", "cpu")  # shapes are traced, and nothing runs
    from fastjax.execution.policies import check_policy
    from fastjax.planning.memory import MemoryLimits
    from fastjax.runs.mesh import check_model, mesh_shapes
    from fastjax.runs.opening import open_shapes
    from fastjax.runs.plan import Planner

    for name in policies or ():
        check_policy(name)
    shapes = mesh_shapes(config.parallel, gpus)
    device = _device(gpu, gpus)
    opened = open_shapes(config)
    check_model(config, opened, shapes)
    room = MemoryLimits(arguments.memory or _share(device, gpu), arguments.host_memory or _host(gpu))
    planned, rows = None, {}
    with console.status("opening the model") as status:
        tell = status.update if console.is_terminal else _say_aside  # minutes of compiling are not silent
        if arguments.longest:
            # Of the meshes that "auto" leaves open, the one of which a device holds least.
            positions = opened.config.max_length
            rows = Planner(config, device, room, tell, shapes[-1]).longest(positions, policies)
        else:
            for shape in shapes:  # of those that "auto" leaves open, the first on which anything fits
                planned = Planner(config, device, room, tell, shape).plan(opened, policies)
                if planned.best is not None:
                    break
    if planned is None:
        content = plan_tables.show_longest(console, config, device.card, rows, room, shapes[-1])
    else:
        content = plan_tables.show(console, config, device.card, planned, room)
    if arguments.output is not None:
        with atomic_file(arguments.output) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())
        console.print(f"written to {arguments.output}", highlight=False, soft_wrap=True)


def _say_aside(text: str) -> None:
    from fastjax.runs.messages import say

    say(Console(stderr=True), text)


def _bytes(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise ConfigError(f"{option}: expected a number of GB greater than 0, got {shorten(text, 80)}")
    return number * 1e9


def _device(gpu: str | None, gpus: int) -> "Device":
    import jax

    from fastjax.planning.aot import AOT
    from fastjax.planning.device import LocalDevice
    from pallas_kernels.cards import CARDS

    if gpu is not None:
        return AOT(gpu, gpus)
    if jax.default_backend() != "gpu":
        raise ConfigError(f"--gpu: expected one of {', '.join(CARDS)}, since JAX sees no GPU on this machine")
    if gpus > jax.device_count():
        raise ConfigError(f"--gpus: expected at most {jax.device_count()} on this machine, got {gpus}; name a --gpu")
    return LocalDevice()


def _share(device: "Device", gpu: str | None) -> float:
    """The bytes that JAX's allocator takes."""
    import jax

    from fastjax.planning.device import ALLOCATOR_SHARE, memory_limit

    here = memory_limit(jax.devices()[0].memory_stats()) if gpu is None else None
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ALLOCATOR_SHARE))
    return here or share * device.card.memory_bytes


def _host(gpu: str | None) -> float:
    from fastjax.planning.device import HOST_BYTES, host_memory

    return host_memory() if gpu is None else HOST_BYTES
