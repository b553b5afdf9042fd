"""The tables of `fastjax plan`, and the same as JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fastjax.training.config import TrainConfig

if TYPE_CHECKING:
    from fastjax.parallel import MeshShape
    from fastjax.planning.cache import CacheRoom
    from fastjax.planning.longest import LongestRow
    from fastjax.planning.memory import MemoryLimits
    from fastjax.runs.plan import PlannedStep, RunPlan
    from pallas_kernels.cards import Card

#: Columns of a terminal that no table fills.
_WIDEST = 500
_BOUNDS = {"device": "the GPU's memory", "host": "the host's memory", "positions": "the model's positions"}


def show(console: Console, config: TrainConfig, card: "Card", plan: "RunPlan", room: "MemoryLimits") -> dict[str, Any]:
    """Print the steps of a run, one a policy.

    Args:
        console: for the table.
        config: the run.
        card: planned for.
        plan: the steps.
        room: what they may take.

    Returns:
        The same in numbers, for a JSON file.
    """
    length, loop, planned, best = config.model.max_seq_length, _loop(config), plan.steps, plan.best
    mesh = planned[0].mesh
    several = mesh.size > 1
    linked = ("link GB", "link ms") if several else ()
    table = _table("held", "step", "in all", "host", "TFLOP", "again", *linked, "ms", "tokens/s", "fits")
    for one in planned:
        memory = one.memory
        cells = (memory.arguments, memory.temporaries, memory.device, memory.host)
        table.add_row(
            one.policy,
            *(f"{count / 1e9:.2f}" for count in cells),
            f"{(one.flops + one.recomputed) / 1e12:,.1f}",
            f"{one.recomputed / one.flops:.0%}",
            *((f"{one.sent / 1e9:.2f}", f"{one.link_seconds * 1e3:,.1f}") if several else ()),
            f"{one.seconds * 1e3:,.0f}",
            f"{one.tokens_per_second:,.0f}",
            "yes" if room.holds(one.memory) else "no",
            style="bold" if one is best else None,
        )
    _print(console, f"{_rows(config, str(length))} · {loop} · {_cards(card, mesh)} · memory in GB", table)
    _say(console, f"{_verdict(config, card, plan, room)}.")
    for policy, why in plan.refused.items():
        _say(console, f"{policy} is left out: {why}.")
    _say(
        console,
        "held: weights, state and batch; step: beside these; in all: with what the allocator adds; TFLOP: of a step, "
        "recomputation included; again: recomputed FLOPs beside the model's; ms: an estimate.",
    )
    if several:
        said = ", ".join(f"{c.times} {c.kind} ({c.sent / 1e9:.2f} GB)" for c in (best or planned[0]).collectives)
        _say(console, f"link: what a card sends in a step, {said or 'nothing'}; tokens/s: of all {mesh.size}.")
    if best is not None:
        _say_pinned(console, best.memory.host)
    if plan.cache is not None:
        _say(console, f"generation: {_cache(plan.cache, length)}.")
    return _limits(card, room) | {
        "mesh": mesh._asdict(),
        "chosen": None if best is None else best.policy,
        "refused": dict(plan.refused),
        "policies": [_figures(one, room) for one in planned],
        "cache": None if plan.cache is None else plan.cache._asdict(),
    }


def _cache(cache: "CacheRoom", length: int | None) -> str:
    """The bytes of a token and of a row's windows and states, and the tokens that fit, in rows of a length."""
    held = f"{cache.token_bytes / 2**10:,.1f} KiB of cache a token in {cache.dtype}"
    held += f" and {cache.row_bytes / 2**20:,.1f} MiB a row for windows and states" if cache.row_bytes else ""
    rows = "" if not length else f", {cache.tokens // length:,} rows of {length:,}"
    return f"{held}; beside weights of {cache.weights / 1e9:.2f} GB {cache.tokens:,} tokens fit{rows}"


def _figures(one: "PlannedStep", room: "MemoryLimits") -> dict[str, Any]:
    """A step in numbers."""
    return {
        "policy": one.policy,
        "fits": room.holds(one.memory),
        "device_bytes": one.memory.device,
        "argument_bytes": one.memory.arguments,
        "temporary_bytes": one.memory.temporaries,
        "host_bytes": one.memory.host,
        "model_flops": one.flops,
        "recomputed_flops": one.recomputed,
        "link_bytes": {c.kind: int(c.sent) for c in one.collectives},
        "link_seconds": one.link_seconds,
        "step_seconds": one.seconds,
        "tokens_per_second": one.tokens_per_second,
    }


def _verdict(config: TrainConfig, card: "Card", plan: "RunPlan", room: "MemoryLimits") -> str:
    """The fastest policy that fits; where none does, what the smallest needs and what to do."""
    from fastjax.runs.plan import smallest
    from fastjax.runs.policies import way_out

    if plan.best is not None:
        policy = plan.best.policy
        return f"fits in {_share(card, room)}, about the fastest: model.use_gradient_checkpointing: {policy}"
    least = smallest(plan.steps)
    return (
        f"nothing fits in {_share(card, room)}: {least.policy} needs {least.memory.device / 1e9:.1f} GB"
        + (f" and {least.memory.host / 1e9:.1f} of the host's" if least.memory.host > room.host else "")
        + f". {way_out(plan.settings, config.training.per_device_train_batch_size)}"
    )


def show_longest(
    console: Console,
    config: TrainConfig,
    card: "Card",
    rows: "Mapping[str, LongestRow | None]",
    room: "MemoryLimits",
    mesh: "MeshShape",
) -> dict[str, Any]:
    """Print the longest rows of a run, one a policy.

    Args:
        console: for the table.
        config: the run.
        card: planned for.
        rows: by policy; None: no row fits.
        room: what a step may take.
        mesh: shape of the mesh.

    Returns:
        The same in numbers, for a JSON file.
    """
    loop = _loop(config)
    table = _table("N", "in all", "host", "bound by")
    for policy, found in rows.items():
        if found is None:
            table.add_row(policy, "none fits", "", "", "")
            continue
        cells = (f"{count / 1e9:.2f}" for count in (found.memory.device, found.memory.host))
        table.add_row(policy, f"{found.tokens:,}", *cells, _BOUNDS[found.bound])
    _print(console, f"{_rows(config, 'N')} · {loop} · {_cards(card, mesh)} · memory in GB", table)
    _say(console, f"in {_share(card, room)} and {room.host / 1e9:.1f} GB of the host's memory; within a hundredth.")
    _say_pinned(console, max((found.memory.host for found in rows.values() if found is not None), default=0))
    return _limits(card, room) | {
        "mesh": mesh._asdict(),
        "longest": [
            {
                "policy": policy,
                "tokens": found.tokens,
                "device_bytes": found.memory.device,
                "host_bytes": found.memory.host,
                "bound": found.bound,
            }
            for policy, found in rows.items()
            if found is not None
        ],
    }


def _limits(card: "Card", room: "MemoryLimits") -> dict[str, Any]:
    return {"gpu": card.device_kind, "memory_limit": int(room.device), "host_memory_limit": int(room.host)}


def _cards(card: "Card", mesh: "MeshShape") -> str:
    return card.device_kind if mesh.size == 1 else f"{card.device_kind} × {mesh.size} · {mesh} · of one card"


def _rows(config: TrainConfig, length: str) -> str:
    training = config.training
    rows = f"{training.per_device_train_batch_size}×{length}"
    if training.gradient_accumulation_steps > 1:
        rows = f"{training.gradient_accumulation_steps}×{rows}"
    return f"{Path(config.model.model_name).name} · {rows} tokens"


def _table(*titles: str) -> Table:
    """A table of policies with these columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("checkpointing", no_wrap=True)
    for title in titles:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    return table


def _print(console: Console, title: str, table: Table) -> None:
    """Print a table with whole numbers, where the console is too narrow for them too."""
    _say(console, title)
    table.width = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    console.print(table, soft_wrap=True)


def _share(card: "Card", room: "MemoryLimits") -> str:
    return f"{room.device / 1e9:.1f} GB of the card's {card.memory_bytes / 1e9:.1f}"


def _loop(config: TrainConfig) -> str:
    return "scan" if config.model.scans else "unroll"


def _say_pinned(console: Console, host: int) -> None:
    from fastjax.planning.device import PINNED_BYTES, pinned_setting

    if host > PINNED_BYTES:
        _say(console, f"so much of the host's memory takes {pinned_setting(host)}.")


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, soft_wrap=True)
