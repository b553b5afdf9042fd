"""A run chooses what its backward pass recomputes by the memory of the device, here of one that is made up."""

import gc
import re
from types import SimpleNamespace

import jax
import pytest

from fastjax.data import lengths
from fastjax.errors import ConfigError, TrainingError
from fastjax.execution.policies import candidates
from fastjax.parallel import MeshShape
from fastjax.planning.choice import PolicyChoice, RejectedPolicy
from fastjax.planning.memory import ALLOCATOR_BYTES, StepMemory
from fastjax.runs import checkpointing, training_run
from fastjax.runs.context import RunStep
from fastjax.runs.fine_tune import fine_tune
from fastjax.runs.model_loading import ModelLoading
from fastjax.runs.steps import RunShapes
from tests.support import chat
from tests.support.runs import config, rows

ORDER = candidates(hidden=True)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    return {
        "model": {"model_name": str(chat.write_model(folder / "model")), "max_seq_length": 48, "load_in_4bit": False},
        "data": {"train": str(chat.write_chats(folder / "chats.jsonl")), "cache_dir": None},
        "lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
    }


@pytest.fixture
def memory(monkeypatch):
    """Sets the bytes that the device's allocator may take."""

    def of(limit):
        monkeypatch.setattr(checkpointing, "device_stats", lambda: {"bytes_limit": limit, "bytes_in_use": 0})

    return of


def run(settings, output, steps, resume=False, **training):
    sections = {
        "training": {"max_steps": steps, "per_device_train_batch_size": 2, **training},
        "optimizer": {"lr_scheduler_type": "constant"},
        "output": {"output_dir": str(output), "save_steps": 2},
    }
    return fine_tune(config(**settings, **sections), resume=resume)


def chosen(folder):
    return [row for row in rows(folder) if row.get("event") == "checkpointing"]


def test_the_choice_and_its_resumption(settings, memory, tmp_path, monkeypatch):
    fastest, *_, least = ORDER
    memory(2**40)
    order, collects = [], []

    def recorded(owner, name):
        method = getattr(owner, name)

        def call(*arguments):
            order.append(name)
            collects.append(gc.isenabled())
            return method(*arguments)

        monkeypatch.setattr(owner, name, call)

    recorded(jax.stages.Traced, "lower")
    recorded(ModelLoading, "start")
    recorded(jax.stages.Lowered, "compile")
    told = checkpointing.before_compiling
    monkeypatch.setattr(checkpointing, "before_compiling", lambda call: order.append(call.__name__) or told(call))
    assert run(settings, tmp_path / "run", 2).model.execution.remat == fastest
    # What lowers has Python to itself, and XLA, which times kernels as it compiles, has the device.
    assert order[:4] == ["lower", "start", "wait", "compile"]
    assert not any(collects[:3]) and gc.isenabled()
    (row,) = chosen(tmp_path / "run")
    assert row["policy"] == fastest and row["refused"] == {} and 0 < row["device_bytes"] < row["limit_bytes"] == 2**40
    (started,) = [row for row in rows(tmp_path / "run") if row.get("event") == "started"]
    assert 0 <= started["overlap_seconds"] < started["load_seconds"]
    assert "gradient checkpointing" in (tmp_path / "run" / "report.html").read_text()
    memory(2**20)  # of which no policy fits: a new run would take the last
    assert run(settings, tmp_path / "run", 4, resume=True).model.execution.remat == fastest
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4]
    memory(2**18)
    order.clear()
    assert run(settings, tmp_path / "small", 1).model.execution.remat == least
    assert set(chosen(tmp_path / "small")[0]["refused"]) == set(ORDER) - {least}
    (started,) = [row for row in rows(tmp_path / "small") if row.get("event") == "started"]
    assert "start" not in order and started["overlap_seconds"] == 0  # XLA may need what the weights would take


@pytest.mark.exhaustive("one")
@pytest.mark.parametrize(
    ("shortest", "ends", "expected"),
    [
        pytest.param(24, (3,), [24, 24, 24], id="one"),
        pytest.param(6, (3, 8), [18, 18, 12, 12, 12, 18, 18, 18], id="several, resumed"),
    ],
)
def test_batches_of_other_lengths(settings, memory, tmp_path, monkeypatch, shortest, ends, expected):
    """The step that was compiled takes the longest and others their own; the losses are those of padded rows."""
    seen, losses, real = [], [], training_run.of_length

    def recorded(length, compiled, other):
        step = real(length, compiled, other)
        return lambda state, frozen, batch: seen.append(batch.tokens.shape[-1]) or step(state, frozen, batch)

    monkeypatch.setattr(training_run, "of_length", recorded)
    memory(2**40)
    own = {**settings, "data": {**settings["data"], "packing": False}}
    monkeypatch.setattr(lengths, "COMPILING", 0)
    for name, least, parts in (("cut", shortest, ends), ("whole", 48, ends[-1:])):
        monkeypatch.setattr(lengths, "SHORTEST", least)
        for number, steps in enumerate(parts):
            run(own, tmp_path / name, steps, resume=number > 0, group_by_length=True)
        losses.append([row["loss"] for row in rows(tmp_path / name) if "loss" in row])
    assert seen == [*expected, *[48] * len(expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # float32


def test_out_of_memory_names_the_arrays_and_the_way_out(settings, memory, tmp_path, monkeypatch):
    memory(2**40)

    def fit(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")

    monkeypatch.setattr(training_run, "fit", fit)
    fastest, after, *_ = ORDER
    said = rf"allocate 9 bytes\.\. The step \({fastest}\) holds .* GiB of weights .* GiB f32\[.*Set model\."
    others = "model.offload_layers: true or training.offload_optimizer: true, or lower training.per_device"
    with pytest.raises(TrainingError, match=rf"{said}use_gradient_checkpointing: {after} or {others}"):
        run(settings, tmp_path / "run", 1)


@pytest.mark.parametrize(("policy", "way"), [("projections", "Set model.*: true, or lower"), ("full", "Lower")])
def test_out_of_memory_of_a_step_whose_model_is_not_known(policy, way):
    """`Trainer`'s: of the policy its name alone is known."""
    said = checkpointing._advice("RESOURCE_EXHAUSTED", RunStep(policy, None, MeshShape()))
    assert re.fullmatch(rf".*RESOURCE_EXHAUSTED\. {way} training\.per_device.* or model\.max_seq_length", said)


@pytest.mark.exhaustive("8-5-True")
@pytest.mark.parametrize(("there", "pinned", "hint"), [(8, 5, True), (5, 8, False)])
def test_the_hosts_memory_bounds_a_run_too(settings, memory, tmp_path, monkeypatch, there, pinned, hint):
    """What it has and what XLA pins of it; here the step needs six bytes. The run says so and is tried all the same."""
    memory(2**40)
    monkeypatch.setattr(checkpointing, "host_memory", lambda: there)
    monkeypatch.setattr(checkpointing, "pinned_limit", lambda: pinned)
    monkeypatch.setattr(StepMemory, "of", lambda compiled: StepMemory(2**20, 2**20, 6))
    own = {**settings, "model": {**settings["model"], "use_gradient_checkpointing": "offload_attention"}}
    run(own, tmp_path / "run", 1)
    (row,) = chosen(tmp_path / "run")
    assert row["host_limit_bytes"] == 5 and "in the host's memory, which is more than there is" in row["message"]
    assert ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=2 in" in row["message"]) == hint


def test_policies_of_which_none_suits_end_with_the_reason(settings, memory, tmp_path, monkeypatch):
    memory(2**40)

    def step(self, policy, mesh=None):
        raise ConfigError(f"layer_loop: {policy} is not served")

    monkeypatch.setattr(RunShapes, "step", step)
    with pytest.raises(ConfigError, match=f"layer_loop: {ORDER[-1]} is not served"):
        run(settings, tmp_path / "run", 1)


@pytest.mark.parametrize(
    ("at_k", "policy", "compiled"),
    [
        (lambda k: 10 + 0.5 * k, "projections:4", ["projections:4"]),
        (lambda k: 10 + k, "projections:2", ["projections:4", "projections:2"]),
        (lambda k: 13, "full", ["projections:4", "projections:2"]),
    ],
    ids=["as estimated", "more a layer", "never"],
)
def test_memory_left_over_keeps_projections_in_the_first_layers(at_k, policy, compiled):
    """Of eight layers, which by the estimate add half a unit each to ten; there are twelve units."""
    unit, asked = 2**30, []

    def memory(units):
        return StepMemory(0, int(units * unit) - ALLOCATOR_BYTES, 0)

    def compile(name):
        asked.append(name)
        return memory(at_k(int(name.removeprefix("projections:")))), name

    choice = PolicyChoice("full", memory(10), 12 * unit, [RejectedPolicy("projections", 14 * unit)], "full")
    shapes = SimpleNamespace(model=lambda _: SimpleNamespace(config=SimpleNamespace(num_hidden_layers=8)))
    at_least = {"full": 3 * unit, "projections": 7 * unit}
    filled = checkpointing._filled(choice, shapes, at_least.get, compile)
    assert (filled.policy, filled.compiled, asked) == (policy, policy, compiled)
