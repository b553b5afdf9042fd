"""A run chooses what its backward pass recomputes by the memory of the device, here of one that is made up."""

import gc
from types import SimpleNamespace

import jax
import pytest

from fastjax.data import grouping
from fastjax.errors import TrainingError
from fastjax.planning.choice import Choice, Refused, candidates
from fastjax.planning.memory import ALLOCATOR_BYTES, StepMemory
from fastjax.runs import checkpointing, training_run
from fastjax.runs.fine_tune import fine_tune
from fastjax.runs.model_loading import ModelLoading
from tests.support import chat
from tests.support.runs import config, rows

pytestmark = pytest.mark.one_world


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
    fastest, *_, least = candidates()
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
    assert run(settings, tmp_path / "run", 2).model.remat == fastest
    # What lowers has Python to itself, and XLA, which times kernels as it compiles, has the device.
    assert order[:4] == ["lower", "start", "wait", "compile"]
    assert not any(collects[:3]) and gc.isenabled()
    (row,) = chosen(tmp_path / "run")
    assert row["policy"] == fastest and row["refused"] == {} and 0 < row["device_bytes"] < row["limit_bytes"] == 2**40
    (started,) = [row for row in rows(tmp_path / "run") if row.get("event") == "started"]
    assert 0 <= started["overlap_seconds"] < started["load_seconds"]
    assert "gradient checkpointing" in (tmp_path / "run" / "report.html").read_text()
    memory(2**20)  # of which no policy fits: a new run would take the last
    assert run(settings, tmp_path / "run", 4, resume=True).model.remat == fastest
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4]
    memory(2**18)
    order.clear()
    assert run(settings, tmp_path / "small", 1).model.remat == least
    assert set(chosen(tmp_path / "small")[0]["refused"]) == set(candidates()) - {least}
    (started,) = [row for row in rows(tmp_path / "small") if row.get("event") == "started"]
    assert "start" not in order and started["overlap_seconds"] == 0  # XLA may need what the weights would take


def test_batches_of_several_lengths(settings, memory, tmp_path, monkeypatch):
    """The step that was compiled takes whole rows and others their own; the losses are those of padded rows."""
    lengths, losses, real = [], [], training_run.of_length

    def recorded(length, compiled, other):
        step = real(length, compiled, other)
        return lambda state, frozen, batch: lengths.append(batch.tokens.shape[-1]) or step(state, frozen, batch)

    monkeypatch.setattr(training_run, "of_length", recorded)
    memory(2**40)
    own = {**settings, "data": {**settings["data"], "packing": False}}
    for name, tile, ends in (("cut", 6, (3, 8)), ("whole", 48, (8,))):
        monkeypatch.setattr(grouping, "TILE", tile)
        for number, steps in enumerate(ends):
            run(own, tmp_path / name, steps, resume=number > 0, group_by_length=True)
        losses.append([row["loss"] for row in rows(tmp_path / name) if "loss" in row])
    assert lengths == [18, 18, 12, 12, 12, 18, 18, 18, *[48] * 8]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # float32


def test_out_of_memory_names_the_arrays_and_the_way_out(settings, memory, tmp_path, monkeypatch):
    memory(2**40)

    def fit(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")

    monkeypatch.setattr(training_run, "fit", fit)
    fastest, after, *_ = candidates()
    said = rf"allocate 9 bytes\.\. The step \({fastest}\) holds .* GiB of weights .* GiB f32\[.*Set model\."
    with pytest.raises(TrainingError, match=rf"{said}use_gradient_checkpointing: {after}, or lower"):
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

    choice = Choice("full", memory(10), 12 * unit, [Refused("projections", 14 * unit)], "full")
    shapes = SimpleNamespace(model=lambda _: SimpleNamespace(config=SimpleNamespace(num_hidden_layers=8)))
    at_least = {"full": 3 * unit, "projections": 7 * unit}
    filled = checkpointing._filled(choice, shapes, at_least.get, compile)
    assert (filled.policy, filled.compiled, asked) == (policy, policy, compiled)
