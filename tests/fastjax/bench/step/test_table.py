"""Results of the largest steps, as 80 columns show them, and as rows of a file."""

import dataclasses
import io

import pytest
from rich.console import Console

from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.peers import cases_of
from fastjax.bench.step.table import Line, print_results, rows_of
from fastjax.parallel import MeshShape

CASES = [StepCase("llama3-8b", 4, 2048, kept, loop) for kept in ("projections", "full") for loop in ("unroll", "scan")]
FOUND = StepResult(
    "NVIDIA H200", "0.11.2", "bfloat16", 0.5089, 16091.2, 412.25, 115.6, int(130.56 * 2**30), None, [12.5, 11.123]
)
MEASURED = [
    Line(CASES[0], FOUND),
    Line(CASES[2], dataclasses.replace(FOUND, tokens_per_second=None, fault="it [does] not train")),
    Line(cases_of(CASES)[0], dataclasses.replace(FOUND, compile_seconds=None), "Unsloth 2026.10.9"),
]


def printed(lines):
    console = Console(file=io.StringIO(), width=80)
    print_results(console, lines)
    text = console.file.getvalue()
    assert "…" not in text
    return text


def test_on_a_terminal():
    text = printed(MEASURED)
    lines = [line.split() for line in text.splitlines()]
    figures = ["508.9", "16,091", "412.25", "115.6", "130.56", "11.123"]
    title = " ".join(text[: text.index("tokens/s")].split())
    assert "step · llama3-8b · QLoRA, NF4, r=16 · 4×2,048 · NVIDIA H200 · jax 0.11.2" in title
    assert ["fastjax", "projections", "unroll", *figures] in lines
    assert ["Unsloth", "none", *figures[:3], *figures[4:]] in lines
    assert "fastjax full unroll: it [does] not train" in text


def test_what_lies_in_the_host():
    case = dataclasses.replace(CASES[0], offload_embedding=True, offload_layers=True, offload_optimizer=True)
    assert case.kept == "projections, embedding on the host, layers on the host, moments on the host"
    assert "moments on the host unroll: it does not fit" in " ".join(
        printed([Line(case, dataclasses.replace(FOUND, error="it does not fit")), Line(CASES[1], FOUND)]).split()
    )


def test_several_devices():
    """Settings that all have stand above the table, and options of the compiler below it."""
    case, options = dataclasses.replace(CASES[0], compiler_options=("xla_a=1",)), ("xla_a=2", "xla_b=3")
    two = dataclasses.replace(case, mesh=MeshShape(context=2, tensor=2))
    fast = dataclasses.replace(FOUND, tokens_per_second=3 * FOUND.tokens_per_second)
    lines = [Line(case, FOUND), Line(two, fast), Line(dataclasses.replace(two, compiler_options=options), fast)]
    text = printed(lines)
    assert "· 4×2,048 · unroll ·" in text
    words = [line.split() for line in text.splitlines()]
    assert ["one", "device", "projections", "1", "508.9", "16,091", "100.0%", "130.56"] in words
    four = ["context", "2", "×", "tensor", "2", "projections"]
    assert [*four, "1", "508.9", "48,274", "75.0%", "130.56"] in words
    assert [*four, "2", "508.9", "48,274", "130.56"] in words
    assert "options 1: xla_a=1\noptions 2: xla_a=2, xla_b=3\n" in text
    one, four, other = rows_of(lines, date="2026-11-23")
    assert (one["date"], one["mesh"], four["mesh"], four["devices"]) == (
        "2026-11-23", "one device", "context 2 × tensor 2", 4,
    )  # fmt: skip
    assert (one["share_of_linear"], other["share_of_linear"]) == (1.0, None)
    assert four["share_of_linear"] == pytest.approx(0.75)
    assert four["tokens_per_second_per_device"] == pytest.approx(0.75 * one["tokens_per_second_per_device"])


def test_cases_of_unsloth():
    assert [(case.checkpointing, case.layer_loop) for case in cases_of(CASES)] == [("none", ""), ("unsloth", "")]
    there = dict.fromkeys(("offload_embedding", "offload_layers", "offload_optimizer"), True)
    moved = [dataclasses.replace(case, mlp_chunk=64, **there) for case in CASES]
    assert [case.kept for case in cases_of([*CASES, *moved])] == ["none", "unsloth"], "nothing there of this project's"
