"""`fastjax plan`: a plan for a card that is not there, and what it refuses."""

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from fastjax.cli import main
from fastjax.commands import plan_tables
from fastjax.parallel import MeshShape
from fastjax.planning import aot
from fastjax.planning.cache import CacheRoom
from fastjax.planning.collectives import Collective
from fastjax.planning.memory import ALLOCATOR_BYTES, MemoryLimits, StepMemory
from fastjax.runs.plan import PlannedStep, RunPlan
from fastjax.training import compiled
from pallas_kernels.cards import CARDS
from tests.support.aot import QUICK_CODE, needs_cuda_plugin
from tests.support.runs import config


@pytest.fixture
def settings(chat_folder, tmp_path):
    """A file of settings; its data and its tokenizer do not matter."""
    content = {
        "model": {"model_name": str(chat_folder), "max_seq_length": 128},
        "data": {"train": "nowhere.jsonl"},
        "lora": {"r": 4},
        "output": {"output_dir": str(tmp_path / "out")},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


@pytest.fixture
def quickly(monkeypatch):
    """Code is made in the quickest way: plans read the program before it is made."""
    monkeypatch.setattr(compiled, "COMPILER_OPTIONS", {**compiled.COMPILER_OPTIONS, **QUICK_CODE})


@needs_cuda_plugin
@pytest.mark.aot
@pytest.mark.usefixtures("quickly")
def test_a_plan_without_a_card(settings, tmp_path, capsys):
    """Two cards hold half of the matrices each; gathering the other half takes the link."""
    output = tmp_path / "plan.json"
    options = ["--gpu", "t4", "--memory", "2.5", "--checkpointing", "full", "--output", str(output)]
    assert main(["plan", settings, *options, "--gpus", "2", "--parallel.fsdp", "2"]) == 0
    plan = json.loads(output.read_text())
    assert (plan["gpu"], plan["memory_limit"], plan["chosen"]) == ("Tesla T4", 2.5e9, "full")
    assert plan["mesh"] == {"data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 1}
    (row,) = plan["policies"]
    assert row["policy"] == "full" and row["fits"] and row["host_bytes"] == 0
    assert row["device_bytes"] > row["argument_bytes"] > 68_928 / 4, "at least half of four bits a parameter"
    assert 0 < row["recomputed_flops"] < row["model_flops"] < 65e12 * row["step_seconds"]
    assert row["link_bytes"]["all-gather"] > 0 and 0 < row["link_seconds"] < row["step_seconds"]
    assert not (tmp_path / "out").exists()
    said, told = capsys.readouterr()
    assert told.splitlines()[-1] == "compiling for Tesla T4: full"
    assert "Tesla T4 × 2 · fsdp 2 · of one card" in said and "model.use_gradient_checkpointing: full" in said
    assert f"{row['tokens_per_second']:,.0f}  " in said


@needs_cuda_plugin
@pytest.mark.aot
@pytest.mark.exhaustive(by="test_a_plan_without_a_card")
@pytest.mark.usefixtures("quickly")
def test_a_plan_of_one_card_beside_one_of_two(settings, tmp_path, capsys):
    output = tmp_path / "plan.json"
    options = ["--gpu", "t4", "--memory", "2.5", "--checkpointing", "full", "--output", str(output)]
    assert main(["plan", settings, *options]) == 0
    plan = json.loads(output.read_text())
    assert (plan["gpu"], plan["memory_limit"], plan["chosen"]) == ("Tesla T4", 2.5e9, "full")
    (row,) = plan["policies"]
    assert row["policy"] == "full" and row["fits"] and row["host_bytes"] == 0
    assert row["device_bytes"] > row["argument_bytes"] > 68_928 / 2, "at least four bits a parameter"
    assert 0 < row["recomputed_flops"] < row["model_flops"] < 65e12 * row["step_seconds"]
    assert not (tmp_path / "out").exists()
    said, told = capsys.readouterr()
    assert told.splitlines()[-1] == "compiling for Tesla T4: full"
    assert "Tesla T4" in said and "model.use_gradient_checkpointing: full" in said
    assert row["link_bytes"] == {} and row["link_seconds"] == 0
    # Two cards: of the matrices each holds half, and what it gathers takes the link. MLPs by chunks compute again.
    assert main(["plan", settings, *options, "--gpus", "2", "--parallel.fsdp", "2", "--model.mlp_chunk", "64"]) == 0
    plan = json.loads(output.read_text())
    (shards,) = plan["policies"]
    assert plan["mesh"] == {"data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 1}
    assert row["argument_bytes"] - shards["argument_bytes"] > 68_928 / 4, "half of four bits a parameter"
    assert shards["link_bytes"]["all-gather"] > 0 and 0 < shards["link_seconds"] < shards["step_seconds"]
    assert shards["model_flops"] == row["model_flops"], "a card's"
    assert shards["recomputed_flops"] == pytest.approx(row["recomputed_flops"], rel=0.02)
    said = capsys.readouterr().out
    assert "Tesla T4 × 2 · fsdp 2 · of one card" in said
    assert re.search(r"again +GB +ms +ms +tokens/s +fits", said), "whole, where the output is no terminal"
    assert f"{shards['tokens_per_second']:,.0f}  " in said


@needs_cuda_plugin
@pytest.mark.aot
@pytest.mark.exhaustive(by="test_a_plan_without_a_card")
@pytest.mark.usefixtures("quickly")
def test_a_plan_of_full_fine_tuning(settings, tmp_path):
    """No weight is frozen."""
    content, output = yaml.safe_load(Path(settings).read_text()), tmp_path / "plan.json"
    content = {name: section for name, section in content.items() if name != "lora"}
    content["model"] |= {"full_finetuning": True, "load_in_4bit": False}
    Path(settings).write_text(yaml.safe_dump(content))
    assert main(["plan", settings, "--gpu", "h200", "--checkpointing", "full", "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["policies"]
    assert row["argument_bytes"] > 3 * 4 * 68_928, "weights and two moments in float32"


@needs_cuda_plugin
@pytest.mark.aot
@pytest.mark.exhaustive(by="test_the_longest_row_of_a_card_that_compiles_nothing, test_a_plan_without_a_card")
@pytest.mark.usefixtures("quickly")
def test_the_longest_row_that_fits(settings, tmp_path, capsys):
    output = tmp_path / "plan.json"
    options = ["--gpu", "t4", "--longest", "--checkpointing", "full", "--output", str(output)]
    assert main(["plan", settings, *options]) == 0
    plan = json.loads(output.read_text())
    assert plan["host_memory_limit"] == 128e9
    (row,) = plan["longest"]
    assert (row["policy"], row["bound"]) == ("full", "positions") and 0 < row["device_bytes"] < plan["memory_limit"]
    said = capsys.readouterr().out
    assert f"{row['tokens']:,}" in said and "the model's positions" in said
    # Two cards that share a row, each with less room than the whole one takes.
    narrow = f"{row['device_bytes'] / 1e9 - 0.001}"
    assert main(["plan", settings, *options, "--gpus", "2", "--parallel.context", "2", "--memory", narrow]) == 0
    plan = json.loads(output.read_text())
    (half,) = plan["longest"]
    assert plan["mesh"]["context"] == 2 and half["tokens"] % 4 == 0
    assert half["tokens"] == row["tokens"] and half["device_bytes"] < row["device_bytes"]
    assert "Tesla T4 × 2 · context 2 · of one card" in capsys.readouterr().out


def test_the_longest_row_of_a_card_that_compiles_nothing(settings, tmp_path, capsys, monkeypatch):
    """The command's figures and words, with made-up memories."""
    monkeypatch.setattr("fastjax.commands.plan._device", lambda gpu, gpus: Nothing())
    measured = []

    def compiled(planner, run, policy):
        measured.append((run.config.model.max_seq_length, policy))
        names = ("output", "alias", "generated_code", "host_argument", "host_output", "host_alias", "host_temp")
        sizes = {f"{name}_size_in_bytes": 0 for name in (*names, "argument")}
        sizes["temp_size_in_bytes"] = 10**6 * measured[-1][0]
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes), as_text=lambda: "")

    monkeypatch.setattr("fastjax.runs.plan.Planner._compiled", compiled)
    output = tmp_path / "plan.json"
    options = ["--gpu", "t4", "--longest", "--checkpointing", "full", "--output", str(output)]
    assert main(["plan", settings, *options]) == 0
    plan = json.loads(output.read_text())
    (row,) = plan["longest"]
    assert (row["policy"], row["bound"], row["tokens"]) == ("full", "positions", measured[-1][0])
    assert plan["host_memory_limit"] == 128e9 and row["device_bytes"] == 10**6 * row["tokens"] + ALLOCATOR_BYTES
    said, told = capsys.readouterr()
    assert f"{row['tokens']:,}" in said and "the model's positions" in said
    assert told.splitlines()[-1] == f"compiling for Tesla T4: full, rows of {row['tokens']:,} tokens"
    narrow = (row["device_bytes"] - 1) / 1e9
    assert main(["plan", settings, *options, "--memory", f"{narrow}"]) == 0
    assert json.loads(output.read_text())["longest"] == [] and "none fits" in capsys.readouterr().out


class Nothing:
    """A card that compiles nothing."""

    card, devices = CARDS["t4"], ()

    def tracing(self):
        return contextlib.nullcontext()


def shown(plan, room, **training):
    """The lines that are printed of a plan, and its JSON."""
    console = Console(file=io.StringIO(), width=120)
    content = plan_tables.show(console, config(training=training), CARDS["h200"], plan, room)
    return console.file.getvalue().splitlines(), content


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(fsdp=8)], ids=str)
def test_the_table_has_the_flops_of_a_step(mesh):
    """FLOPs of the model and of the recomputation, and why policies are left out; in 120 columns."""
    step = StepMemory(101 * 10**9, 98 * 10**9, 138 * 10**9)
    sent = (Collective("all-gather", 64, 25e9),)
    row = PlannedStep("offload_projections", step, 5361.5e12, 493e12, 123.456, 2**19, mesh, sent, 1.234)
    cache = CacheRoom(6 * 10**9, "bfloat16", 2**17, 3 * 2**19, 10_000) if mesh.size == 1 else None
    plan = RunPlan([row], {"offload": "layer_loop: expected 'scan', got layers one by one"}, (), row, cache)
    room = MemoryLimits(2.2e11, 2e11)
    lines, content = shown(plan, room)
    (titles,) = (line for line in lines if re.search(r"TFLOP .*tokens/s +fits", line))
    (cells,) = (line for line in lines if line.strip().startswith("offload_projections "))
    assert max(map(len, (titles, cells))) <= 120
    assert re.search(r" 138\.00 +5,854\.5 +9% ", cells)
    assert "offload is left out: layer_loop: expected 'scan', got layers one by one." in lines
    assert content["refused"] == plan.refused and content["policies"][0]["model_flops"] == 5361.5e12
    said = "generation: 128.0 KiB of cache a token in bfloat16 and 1.5 MiB a row for windows and states; beside weights"
    assert [line for line in lines if line.startswith(said)] == ([] if cache is None else lines[-1:])
    assert content["cache"] == (None if cache is None else cache._asdict())


@pytest.mark.parametrize(
    ("settings", "rows", "said"),
    [
        ((), 2, "Lower training.per_device_train_batch_size (and raise gradient_accumulation_steps as much) or model."),
        (("model.offload_layers: true",), 1, "Set model.offload_layers: true, or lower model.max_seq_length."),
    ],
)
def test_the_way_out_where_nothing_fits(settings, rows, said):
    row = PlannedStep("full", StepMemory(9 * 10**9, 10**9, 0), 1e12, 1e11, 0.1, 4096)
    lines, _ = shown(RunPlan([row], {}, settings), MemoryLimits(5e9, 1e9), per_device_train_batch_size=rows)
    assert any("nothing fits in 5.0 GB of the card's 150.1: full needs 10.5 GB. " + said in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--gpu: expected one of b200, h200, .*, t4, since JAX sees no GPU on this machine"),
        (["--gpu", "gt 710"], "--gpu: expected one of b200, h200, .*, t4, got gt 710"),
        (["--gpu", "t4", "--memory", "much"], "--memory: expected a number of GB greater than 0, got much"),
        (["--gpu", "t4", "--host_memory", "-1"], "--host_memory: expected a number of GB greater than 0, got -1"),
        (
            ["--gpu", "t4", "--checkpointing", "some"],
            "use_gradient_checkpointing: expected one of .*full.*, or NAME:k .* got 'some'",
        ),
        (["--gpu", "t4", "--gpus", "0"], "--gpus: expected at least 1, got 0"),
        (
            ["--gpu", "t4", "--gpus", "2", "--parallel.fsdp", "4"],
            "parallel: expected a product of at most 2, got fsdp 4",
        ),
        (["--gpu", "t4", "--model.dtype", "bfloat16"], "model.dtype: expected float16 or float32 on Tesla T4, which"),
    ],
)
def test_refusals(settings, options, message, capsys, monkeypatch):
    monkeypatch.setattr(aot, "why_not", lambda: None)
    monkeypatch.setattr(aot.topologies, "get_topology_desc", lambda **_: None)
    monkeypatch.setattr(aot.topologies, "make_mesh", lambda **_: None)
    assert main(["plan", settings, *options]) == 2

    assert re.search(message, capsys.readouterr().err)


def test_the_missing_compiler_is_named(settings, capsys, monkeypatch):
    monkeypatch.setattr(aot, "_installed", lambda name: False)
    assert main(["plan", settings, "--gpu", "h200"]) == 2
    said = capsys.readouterr().err
    assert "pip install --no-deps jax-cuda13-plugin==" in said and " jax-cuda13-pjrt==" in said
