"""The headline figures of a run, and its lists, in words."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastjax.training.plain_lines import duration
from fastjax.training.report.history import History, Spike, median, smoothing_window

MOST_ROWS = 20
"""Rows of a list in the report; metrics.jsonl has them all."""


class Fact(NamedTuple):
    """A figure with its name.

    Attributes:
        label: its name.
        value: the figure, with its unit.
        note: a remark.
    """

    label: str
    value: str
    note: str = ""


def headline(history: History) -> list[Fact]:
    """The figures at the top of the report.

    Args:
        history: the run.
    """
    steps, best = history.steps, history.best
    facts = []
    if len(steps["step"]):
        epoch = steps["epoch"][-1]
        facts.append(Fact("steps", f"{steps['step'][-1]:,.0f}", f"{epoch:.3g} epochs" if np.isfinite(epoch) else ""))
        last = steps["loss"][-smoothing_window(len(steps["step"])) :]
        last = last[np.isfinite(last)]
        mean = show_loss(last.mean()) if last.size else "not finite"
        facts.append(Fact("training loss", mean, f"mean of the last {_count(last.size, 'step')}"))
    if best is not None:
        note = f"step {best['step']:,}" + (
            f", perplexity {best['eval_perplexity']:.3g}" if "eval_perplexity" in best else ""
        )
        facts.append(Fact("best held-out loss", show_loss(best["eval_loss"]), note))
        if best.get("eval_token_accuracy") is not None:
            facts.append(Fact("held-out accuracy", f"{best['eval_token_accuracy']:.1%}", "of tokens, at that step"))
    speed = median(steps["tokens_per_second"])
    if speed is not None:
        each = median(steps["tokens_per_second_per_device"])
        note = "tokens a second, median" + ("" if each is None else f"; {each:,.0f} a device")
        facts.append(Fact("throughput", f"{speed:,.0f}", note))
    utilization = median(steps["model_flops_utilization"])
    if utilization is not None:
        facts.append(Fact("MFU", f"{utilization:.1%}", "of the device's peak FLOP/s, median"))
    if history.known("memory_bytes"):
        facts.append(Fact("peak memory", f"{np.nanmax(steps['memory_bytes']) / 2**30:.1f} GiB", "of a device"))
    if history.known("seconds"):
        tokens = np.nansum(steps["num_tokens"])
        facts.append(Fact("time", duration(history.seconds), f"{_short(tokens)} tokens" if tokens else ""))
    skipped = int((steps["skipped"] == 1).sum())
    if skipped:
        facts.append(Fact("skipped steps", f"{skipped:,}", "gradient overflow in float16"))
    return facts


def list_events(history: History) -> dict[str, Any]:
    """The events in order, with the last checkpoint only and one line for all skipped steps.

    Args:
        history: the run.

    Returns:
        rows, and the number of hidden ones.
    """
    saved = [row for row in history.events if row["event"] == "saved"]
    rows: list[Mapping[str, Any]] = [row for row in history.events if row["event"] != "saved" or row is saved[-1]]
    if len(saved) > 1:
        rows[rows.index(saved[-1])] = {
            "step": saved[-1]["step"],
            "message": f"{saved[-1]['message']} ({len(saved):,} checkpoints in all)",
        }
    skipped = history.steps["step"][history.steps["skipped"] == 1]
    if skipped.size:
        listed = ", ".join(f"{step:,.0f}" for step in skipped[:10]) + ", …" * (skipped.size > 10)
        message = f"{_count(skipped.size, 'step')} skipped, the gradient overflowed in float16: {listed}"
        rows.append({"step": int(skipped[0]), "message": message})
    rows.sort(key=lambda row: row["step"])
    shown = rows[: MOST_ROWS // 2] + rows[MOST_ROWS // 2 :][-MOST_ROWS // 2 :]
    return {"rows": shown, "hidden": len(rows) - len(shown)}


def list_samples(history: History) -> list[Mapping[str, str | None]]:
    """Answers to held-out prompts: "prompt", "expected", "answer", and "before", the answer before training if known.

    Args:
        history: the run.
    """
    told = [row for row in history.events if row.get("samples")]
    if not told:
        return []
    before = {sample["prompt"]: sample["answer"] for row in told if row["step"] == 0 for sample in row["samples"]}
    return [sample | {"before": before.get(sample["prompt"])} for sample in told[-1]["samples"] if told[-1]["step"]]


def list_spikes(spikes: Sequence[Spike]) -> dict[str, Any]:
    """The largest spikes, by step.

    Args:
        spikes: all.

    Returns:
        rows, and the number of hidden ones.
    """
    largest = sorted(spikes, key=lambda spike: spike.expected - spike.loss)[:MOST_ROWS]
    return {"rows": sorted(largest), "hidden": len(spikes) - len(largest)}


def list_evaluations(history: History, most: int = 12) -> dict[str, Any] | None:
    """The evaluations as a table: the first, the last, the best.

    Args:
        history: the run.
        most: rows.

    Returns:
        names of the columns, rows of cells with `best`, and the number of hidden rows; None without evaluations.
    """
    rows = history.evaluations
    if not rows:
        return None
    formats = {"eval_loss": show_loss, "eval_perplexity": "{:.4g}".format, "eval_token_accuracy": "{:.1%}".format}
    names = [name for name in formats if history.evaluated(name)[0]] + history.own_metrics
    chosen = set(range(len(rows)))
    if len(rows) > most:
        best = next(index for index, row in enumerate(rows) if row is history.best) if history.best else 0
        chosen = {0, best, *range(len(rows) - most + 2, len(rows))}
    shown = []
    for index in sorted(chosen):
        row = rows[index]
        values = [(formats.get(name, "{:.4g}".format), row.get(name)) for name in names]
        cells = [f"{row['step']:,}", *("–" if value is None else show(value) for show, value in values)]
        shown.append({"cells": cells, "best": row is history.best and len(rows) > 1})
    words = {"eval_loss": "loss", "eval_perplexity": "perplexity", "eval_token_accuracy": "token accuracy"}
    return {
        "names": [words.get(name, name.removeprefix("eval_")) for name in names],
        "rows": shown,
        "hidden": len(rows) - len(chosen),
    }


def show_loss(loss: float) -> str:
    """A loss to four places, or three digits if it is small."""
    return f"{loss:.4f}" if abs(loss) >= 0.1 else f"{loss:.3g}"


def about(config: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The run in a sentence: method, model, device, day."""
    model = config.get("model", {})
    method = "Full fine-tuning" if model.get("full_finetuning") else "QLoRA" if model.get("load_in_4bit") else "LoRA"
    parts = [f"{method} of {model.get('model_name', 'a model')}", environment.get("device"), environment.get("date")]
    return " · ".join(part for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def _short(number: float) -> str:
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
