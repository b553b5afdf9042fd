"""`fastjax bench step` on a tiny model: every figure is there, and none of a step that does not train."""

import concurrent.futures
import dataclasses
import json
import pickle
import re

import jax
import numpy as np
import pytest

from fastjax.bench.step import measure as measuring
from fastjax.bench.step import peers
from fastjax.bench.step import run as running
from fastjax.bench.step.build import build_model
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.cli import main
from fastjax.host_memory import in_host_memory
from fastjax.language_model.host import has_host_embedding, has_host_layers
from fastjax.training import head

SIZE = ("--preset", "tiny", "--batch", "2", "--seq", "32", "--steps", "2", "--warmup", "1", "--checkpointing", "full")
CASE = StepCase("tiny", 2, 32, "full", "scan", rank=4, steps=2, warmup=1)
FOUND = StepResult("cpu", "0.11.2", "float32", 0.5, 128.0, 1.0, 1.0, None, 2**20, (6.25, 6.0))


class Here(concurrent.futures.Executor):
    """Runs what it is given at once, in this process."""

    def __init__(self, *args, **kwargs):
        assert args == (1,) and kwargs["max_tasks_per_child"] == 1, "each in a process of its own, one after the other"
        assert kwargs["mp_context"].get_start_method() == "spawn"

    def submit(self, function, *args):
        args = pickle.loads(pickle.dumps(args))
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def here(monkeypatch):
    """Everything in this process."""
    monkeypatch.setattr(running.concurrent.futures, "ProcessPoolExecutor", Here)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No other library, whatever is installed."""
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)


@pytest.mark.exhaustive(by="test_packed_rows_with_a_forced_attention")
def test_in_its_own_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    output, traces = tmp_path / "step.json", tmp_path / "traces"
    files = ["--output", str(output), "--profile", str(traces)]
    assert main(["bench", "step", *SIZE, "--rank", "4", *files]) == 0
    out = " ".join(capsys.readouterr().out.split())  # a long path breaks lines
    assert "step · tiny · QLoRA, NF4, r=4 · 2×32 · scan · cpu" in out and "traces in" in out
    assert "Unsloth: not installed" in out
    assert list(traces.rglob("*.xplane.pb"))
    (row,) = json.loads(output.read_text())
    assert (row["checkpointing"], row["layer_loop"], row["dtype"]) == ("full", "scan", "float32")
    assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"])
    assert row["compile_seconds"] > 0
    assert row["step_bytes"] > 0
    assert row["error"] is row["fault"] is None
    assert row["command"] == f"fastjax bench step {' '.join(SIZE)} --rank 4"  # without the places of the files
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"])
    # Random weights and tokens, a vocabulary of 512: the loss starts near its logarithm and falls on the same batch.
    assert row["losses"][0] == pytest.approx(np.log(512), rel=0.1)
    assert row["losses"][-1] < row["losses"][0]
    assert len(row["losses"]) == 3


def test_packed_rows_with_a_forced_attention(tmp_path, capsys, here):
    lengths, output = tmp_path / "lengths.txt", tmp_path / "step.json"
    lengths.write_text("20\n10\n32\n7\n24\n32\n")
    given = [*SIZE, "--rank", "4", "--lengths", str(lengths), "--output", str(output)]
    assert main(["bench", "step", *given, "--attention", "xla"]) == 0
    assert "2×32 packed" in capsys.readouterr().out
    (row,) = json.loads(output.read_text())
    assert row["attention"] == "xla" and row["losses"][-1] < row["losses"][0]
    assert 2 * 28 < row["tokens_per_second"] * row["step_seconds"] <= 2 * 32  # padding is not counted
    with pytest.raises(NotImplementedError, match="'mosaic' cannot serve"):
        main(["bench", "step", *given, "--attention", "mosaic"])


@pytest.mark.exhaustive(
    by="test_packed_rows_with_a_forced_attention, tests/fastjax/bench/step/test_table.py::test_several_devices, "
    "tests/fastjax/training/test_every_mesh.py::test_eight_devices_have_the_loss_and_every_gradient_of_one"
)
def test_several_devices_beside_one(tmp_path, capsys, here):
    """Rows on devices that share their tokens: the same losses, and the share of the devices' speed."""
    output = tmp_path / "step.json"
    given = ["--rank", "4", "--mesh", "one", "context=2,tensor=2", "--output", str(output)]
    options = ["--compiler_options", "xla_cpu_enable_fast_math=false"]
    assert main(["bench", "step", *SIZE, *given, *options]) == 0
    out = capsys.readouterr().out
    assert "step · tiny · QLoRA, NF4, r=4 · 2×32 · scan · cpu" in out and "context 2 × tensor 2 " in out
    one, four = json.loads(output.read_text())
    assert (one["mesh"], one["devices"], four["mesh"], four["devices"]) == ("one device", 1, "context 2 × tensor 2", 4)
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=1e-5)
    assert four["tokens_per_second"] == pytest.approx(64 / four["step_seconds"])
    assert four["tokens_per_second_per_device"] == pytest.approx(four["tokens_per_second"] / 4)
    assert one["share_of_linear"] == 1
    assert four["share_of_linear"] == pytest.approx(four["tokens_per_second"] / (4 * one["tokens_per_second"]))
    assert four["compiler_options"] == ["xla_cpu_enable_fast_math=false"]


@pytest.mark.exhaustive(
    by="test_packed_rows_with_a_forced_attention, "
    "tests/fastjax/cli/test_quantization_aware.py::test_full_fine_tuning_for_int4"
)
def test_a_step_with_fake_quantisers(tmp_path, capsys, here):
    output = tmp_path / "step.json"
    given = ["--method", "full", "--qat", "int4_weight_only", "--output", str(output)]
    assert main(["bench", "step", *SIZE, *given]) == 0
    assert "QAT int4_weight_only" in " ".join(capsys.readouterr().out.split())
    (row,) = json.loads(output.read_text())
    assert row["qat"] == "int4_weight_only" and row["losses"][-1] < row["losses"][0]


def test_a_device_without_enough_memory_is_a_result(monkeypatch):
    def exhausted(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(measuring, "_measure", exhausted)
    assert measuring.measure(CASE).error == "out of memory"


def test_a_step_that_does_not_train_has_no_figure(tmp_path, capsys, here, monkeypatch):
    """A weight that is cut off from the loss: a line says so, and the exit status."""
    project = head.lm_logits
    monkeypatch.setattr(head, "lm_logits", lambda own, hidden: project(own, jax.lax.stop_gradient(hidden)))
    output = tmp_path / "step.json"
    assert main(["bench", "step", *SIZE, "--method", "full", "--output", str(output)]) == 1
    captured = capsys.readouterr()
    assert "trained weights have no gradient" in " ".join(captured.out.split())
    assert "1 of 1 cases gave no figure" in captured.err
    (row,) = json.loads(output.read_text())
    assert "have no gradient" in row["fault"] and row["step_seconds"] is None


def test_first_losses_are_compared(tmp_path, capsys, here, monkeypatch):
    losses = {"full": 6.25, "projections": 6.25, "offload": 6.3}
    monkeypatch.setattr(
        running, "measure", lambda case: dataclasses.replace(FOUND, losses=(losses[case.checkpointing], 6.0))
    )
    output = tmp_path / "step.json"
    given = ["bench", "step", *SIZE[:-2], "--output", str(output), "--checkpointing"]
    assert main([*given, *losses]) == 1
    captured = capsys.readouterr()
    out = " ".join(captured.out.split())
    assert "offload scan: the first loss is 6.30000, and 6.25000 of 2×32 full scan: expected the same" in out
    assert "1 of 3 cases gave no figure" in captured.err
    assert [row["step_seconds"] for row in json.loads(output.read_text())] == [0.5, 0.5, None]
    assert main([*given, "full", "projections"]) == 0


@pytest.mark.exhaustive(by="tests/fastjax/execution/test_streamed.py::test_loaded_layers_stay_in_the_host")
def test_in_the_host(here, monkeypatch):
    """Layers, embeddings and moments there: the same losses, and words for it."""
    states, begin = [], measuring.init_state
    monkeypatch.setattr(measuring, "init_state", lambda *given: states.append(begin(*given)) or states[-1])
    plain, moved = CASE, dataclasses.replace(CASE, offload_layers=True, offload_optimizer=True, offload_embedding=True)
    first, second = measuring.measure(plain).losses, measuring.measure(moved).losses
    np.testing.assert_allclose(second, first, rtol=1e-6)
    assert [in_host_memory(jax.tree.leaves(state.opt_state[1].mu)[0]) for state in (states[0], states[-1])] == [
        False,
        True,
    ]
    model = build_model(moved)
    assert has_host_layers(model) and has_host_embedding(model) and not has_host_layers(build_model(plain))
    assert moved.kept == "full, embedding on the host, layers on the host, moments on the host"
