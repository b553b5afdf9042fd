"""A measured generation: every model in a process of its own, other libraries after them, tables and a file."""

import dataclasses
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from fastjax.bench.generate.measure import measure
from fastjax.bench.generate.peers import PEERS, measure_peer, why_not
from fastjax.bench.generate.settings import GenerateSettings
from fastjax.bench.generate.table import OURS, line_of, print_results, with_slowdown
from fastjax.bench.peer_models import write_peer_model
from fastjax.bench.timing import Row
from fastjax.errors import TrainingError


def run(
    settings: GenerateSettings,
    *,
    command: str | None = None,
    output: Path | None = None,
    profile: Path | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Measure all cases, show tables, write a file; other libraries too where they are installed.

    Args:
        settings: what is measured.
        command: that measures it, for the JSON file; None: it is not known.
        output: JSON file for settings, day (UTC), command and rows; None: no file.
        profile: folder for a trace of each decoding of ours, with the kernels of a token by kind; None: no traces.
        console: for the tables.

    Returns:
        The rows.

    Raises:
        ConfigError: settings that the model or the engine does not take.
        TrainingError: cases without figures, after the tables and the file of the others.
    """
    console, rows = console or Console(), []
    case = dataclasses.asdict(settings)
    about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "command": command, "case": case}
    for row in _rows(settings, profile, console):
        rows.append(row)
        console.print(line_of(row), highlight=False, markup=False)
        if output is not None:  # what is measured outlives a later case that is cut off
            text = json.dumps({**about, "results": with_slowdown(rows)}, indent=1)
            output.write_text(text + "\n", encoding="utf-8")
    rows = with_slowdown(rows)
    print_results(console, settings, rows)
    for place, words in ((profile, "traces in"), (output, "written to")):
        if place is not None:
            console.print(f"{words} {place}", highlight=False)
    own = [row for row in rows if row["by"] == OURS]
    if faults := sum(row["reason"] is not None for row in own):
        raise TrainingError(f"bench generate: {faults} of {len(own)} cases gave no figure: the reasons are above")
    return rows


def _rows(settings: GenerateSettings, profile: Path | None, console: Console) -> Iterator[Row]:
    """The rows of our models, then those of other libraries."""
    for r, loop in itertools.product(settings.r, settings.layer_loop):
        with console.status(f"{OURS} {settings.model} r={r} {loop}"):
            for row in in_process(measure, settings, r, loop, profile):
                yield {"by": OURS, **row}
    if "decode" not in settings.parts:
        return
    absent = {peer: why_not(peer, settings) for peer in PEERS}
    for peer, reason in absent.items():
        if reason is not None:
            console.print(f"{peer.name}: {reason}", highlight=False)
    there = [peer for peer, reason in absent.items() if reason is None]
    if not there:
        return
    with tempfile.TemporaryDirectory(prefix="fastjax-bench-") as folder:
        model = write_peer_model(Path(folder), settings.hf_config, nf4=True)
        for peer in there:
            with console.status(f"{peer.label} {settings.model}"):
                for row in in_process(measure_peer, peer, settings, model):
                    yield {"by": peer.label, **row}


def in_process(function: Callable[..., Iterator[Row]], *arguments: Any) -> Iterator[Row]:
    """The rows that a function yields in a fresh process, as they come: a device's peak memory cannot be reset.

    Args:
        function: of a module.
        *arguments: its own.

    Raises:
        TrainingError: the process ended before the function.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()  # the process has it: its end is the end of what can be received
    try:
        while (row := receiver.recv()) is not None:
            if isinstance(row, Exception):
                raise row
            yield row
    except EOFError:
        process.join()
        raise TrainingError(f"bench generate: its process ended with status {process.exitcode}") from None
    finally:
        receiver.close()
        process.join()


def _send(sender: Connection, function: Callable[..., Iterator[Row]], arguments: tuple[Any, ...]) -> None:
    """Send the rows, and None behind them; or what was raised."""
    try:
        for row in function(*arguments):
            sender.send(row)
    except Exception as error:
        sender.send(error)
    else:
        sender.send(None)
