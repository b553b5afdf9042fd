"""Results of the largest steps, as 80 columns and Markdown show them."""

import dataclasses
import io

from rich.console import Console

from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.peers import cases_of
from fastjax.bench.step.profile import summarize
from fastjax.bench.step.table import Line, draw, markdown, print_results
from fastjax.bench.trace import Kernel
from fastjax.parallel import MeshShape

CASES = [StepCase("llama3-8b", 4, 2048, kept, loop) for kept in ("projections", "full") for loop in ("unroll", "scan")]
KERNEL = Kernel("/device:GPU:0", "loop_" + "add_" * 30 + "fusion", "jit_step", "", 0.0, 4e8)
FOUND = StepResult(
    "NVIDIA H200", "0.11.2", "bfloat16", 0.5089, 16091.2, 412.25, 115.6, int(130.56 * 2**30), None, [12.5, 11.123],
    summarize([KERNEL], 1, {}),
)  # fmt: skip
MEASURED = [
    Line(CASES[0], FOUND),
    Line(CASES[2], dataclasses.replace(FOUND, tokens_per_second=None, fault="off [the] reference", profile=None)),
    Line(cases_of(CASES)[0], dataclasses.replace(FOUND, compile_seconds=None, profile=None), "Unsloth 2026.10.9"),
]


def test_on_a_terminal():
    console = Console(file=io.StringIO(), width=80)
    print_results(console, MEASURED)
    text = console.file.getvalue()
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    figures = ["508.9", "16,091", "412.25", "115.6", "130.56", "11.123"]
    assert "step · llama3-8b · QLoRA, NF4, r=16 · 4×2,048 · NVIDIA H200 · jax 0.11.2" in text
    assert ["fastjax", "projections", "unroll", *figures] in lines
    assert ["Unsloth", "none", *figures[:3], "-", *figures[4:]] in lines
    assert "fastjax full unroll: off [the] reference" in text
    assert "profile · 4×2,048 projections unroll · 400.0 ms a step, busy 100.0%" in text
    assert ["element-wise", "400.00", "100.0%", "1"] in lines and ["idle", "0.00", "0.0%", "0"] in lines


def test_what_lies_in_the_host_stands_above_the_table():
    case = dataclasses.replace(CASES[0], offload_embedding=True, offload_layers=True, offload_optimizer=True)
    lines = [Line(case, FOUND), Line(dataclasses.replace(case, checkpointing="offload_projections"), FOUND)]
    console = Console(file=io.StringIO(), width=80)
    print_results(console, lines)
    text = " ".join(console.file.getvalue().split())
    assert "…" not in text
    assert "r=16 · 4×2,048 · embedding on the host, layers on the host, moments on the host · NVIDIA H200" in text
    assert "offload_projections unroll 508.9 16,091" in text
    assert "| offload_projections, embedding on the host, layers on the host, moments on the host |" in markdown(lines)


def test_several_devices():
    """What all have alike stands above the table, and options of the compiler below it."""
    case, options = dataclasses.replace(CASES[0], compiler_options=("xla_a=1",)), ("xla_a=2", "xla_b=3")
    two = dataclasses.replace(case, mesh=MeshShape(context=2, tensor=2))
    fast = dataclasses.replace(FOUND, tokens_per_second=3 * FOUND.tokens_per_second, profile=None)
    lines = [Line(case, FOUND), Line(two, fast), Line(dataclasses.replace(two, compiler_options=options), fast)]
    console = Console(file=io.StringIO(), width=80)
    print_results(console, lines)
    text = console.file.getvalue()
    assert "…" not in text and "· 4×2,048 · projections · unroll ·" in text
    words = [line.split() for line in text.splitlines()]
    assert ["one", "device", "1", "508.9", "16,091", "16,091", "100.0%", "412.25", "130.56"] in words
    four = ["context", "2", "×", "tensor", "2"]
    assert [*four, "1", "508.9", "48,274", "12,068", "75.0%", "412.25", "130.56"] in words
    assert [*four, "2", "508.9", "48,274", "12,068", "-", "412.25", "130.56"] in words
    assert "options 1: xla_a=1\noptions 2: xla_a=2, xla_b=3\n" in text and "profile · 4×2,048 projections" in text


def test_as_markdown():
    head, _, first, second, third, _, device = markdown(MEASURED).splitlines()
    assert head.count("|") == first.count("|") == second.count("|") == 12
    names = "llama3-8b | QLoRA, NF4, r=16 | 4×2,048"
    assert first == f"| fastjax | {names} | projections | unroll | 508.9 | 16,091 | 412.25 | 115.6 | 130.56 |"
    assert second == f"| fastjax | {names} | full | unroll | off [the] reference |  |  |  |  |"
    assert third == f"| Unsloth 2026.10.9 | {names} | none |  | 508.9 | 16,091 | 412.25 | - | 130.56 |"
    assert device == "NVIDIA H200, jax 0.11.2."


def test_as_a_picture():
    assert draw(MEASURED, "Step").startswith(b"\x89PNG")


def test_its_cases():
    assert [(case.checkpointing, case.layer_loop) for case in cases_of(CASES)] == [("none", ""), ("unsloth", "")]
    there = dict.fromkeys(("offload_embedding", "offload_layers", "offload_optimizer"), True)
    moved = [dataclasses.replace(case, mlp_chunk=64, **there) for case in CASES]
    assert [case.kept for case in cases_of([*CASES, *moved])] == ["none", "unsloth"], "nothing there of this project's"
