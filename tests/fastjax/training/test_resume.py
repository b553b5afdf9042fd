"""What may change between a checkpoint and the run that goes on from it, and damaged checkpoints."""

import dataclasses
import io
import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from fastjax.errors import ConfigError, TrainingError
from fastjax.training.checkpoint import Checkpoints, Progress
from fastjax.training.config import (
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerConfig,
    OutputSection,
    TrainConfig,
    TrainingSection,
)
from fastjax.training.identity import Identity
from fastjax.training.resume import (
    Earlier,
    check_result,
    check_settings,
    damage,
    finished,
    newest,
    restore,
    weight_digests,
)
from fastjax.training.run_folder import RunFolder


def config(**sections):
    base = {"model": {"model_name": "m"}, "data": {"train": "d"}, "output": {"output_dir": "o"}}
    kinds = {
        "model": ModelSection,
        "data": DataSection,
        "output": OutputSection,
        "lora": LoraSection,
        "optimizer": OptimizerConfig,
        "training": TrainingSection,
    }
    made = {name: kinds[name](**(base.get(name, {}) | sections.get(name, {}))) for name in kinds}
    return TrainConfig(**made)


def settings(**sections):
    return dataclasses.asdict(config(**sections))


def earlier(**sections):
    return Earlier(Path("c/7"), True, Progress(7), settings(**sections), Identity("model", "data"), {})


def test_equal_settings():
    assert check_settings(earlier(), settings()) == []


def test_what_may_change_is_told():
    changed = settings(
        optimizer={"learning_rate": 0.5},
        training={"num_train_epochs": 3.0, "logging_steps": 1},
        output={"output_dir": "elsewhere", "save_steps": 5},
        model={"model_name": "moved"},
    )
    assert check_settings(earlier(), changed) == [
        "optimizer.learning_rate: 0.0002 → 0.5",
        "training.num_train_epochs: 1.0 → 3.0",
    ]


def test_another_accumulation_of_the_same_rows():
    old = earlier(training={"per_device_train_batch_size": 8})
    new = settings(training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4})
    assert check_settings(old, new) == [
        "training.per_device_train_batch_size: 8 → 2",
        "training.gradient_accumulation_steps: 1 → 4",
    ]
    with pytest.raises(ConfigError, match="the rows of a step: expected 8, given 4"):
        check_settings(old, settings(training={"per_device_train_batch_size": 4}))


def test_what_makes_another_state_is_refused():
    with pytest.raises(ConfigError) as error:
        check_settings(earlier(), settings(lora={"r": 8}, model={"dtype": "float16"}, training={"seed": 1}))
    message = str(error.value)
    assert message.startswith(
        "c/7 is a checkpoint of another configuration: model.dtype: expected None, given 'float16'"
    )
    assert "lora.r: expected 16, given 8" in message and "training.seed: expected 3407, given 1" in message


@pytest.fixture
def ended(tmp_path):
    """The folder of a finished run."""
    folder = RunFolder(tmp_path, tmp_path / "adapter")
    folder.result.mkdir()
    folder.write_settings(config())
    folder.metrics.write_text('{"step": 3, "loss": 1.0}\n{"step": 3, "event": "finished", "message": ""}\n')
    return folder


def test_a_finished_run(ended):
    assert finished(ended, config())
    assert finished(ended, config(output={"save_steps": 5}, training={"logging_steps": 1}))
    for other in (
        config(training={"num_train_epochs": 3.0}),
        config(data={"eval": "e"}, output={"load_best_model_at_end": True}),
    ):
        assert not finished(ended, other)
    with open(ended.metrics, "a") as file:
        file.write('{"step": 3, "event": "resumed", "message": ""}\n')
    assert not finished(ended, config())


@pytest.mark.parametrize("missing", ["metrics", "settings", "result"])
def test_a_run_that_is_not_known_to_be_finished(ended, missing):
    path = getattr(ended, missing)
    path.rmdir() if missing == "result" else path.unlink()
    assert not finished(ended, config())


def test_a_finished_result_is_compared_with_what_was_written(ended):
    assert damage(ended) is None  # by a version that kept no digests
    file = ended.result / "adapter_model.safetensors"
    file.write_bytes(b"weights")
    (ended.result / "README.md").write_text("of a user")
    row = {"step": 3, "event": "finished", "message": "", "files": weight_digests(ended.result)}
    ended.metrics.write_text(json.dumps(row) + "\n")
    assert list(row["files"]) == [file.name] and damage(ended) is None
    file.write_bytes(b"weighTs")
    assert damage(ended) == "adapter_model.safetensors is not as it was written"
    file.unlink()
    assert damage(ended) == "adapter_model.safetensors is missing"


def test_a_result_is_not_replaced_without_a_checkpoint_to_go_on_from(ended):
    with pytest.raises(ConfigError) as error:
        check_result(ended, config(lora={"r": 8}, training={"seed": 1}, output={"save_steps": 5}))
    assert str(error.value) == (
        f"--resume: expected the settings of {ended.result}, which is finished and has no checkpoint to go on from "
        "with others: lora.r: expected 16, given 8; training.seed: expected 3407, given 1. Go back to them, name "
        "another folder, or replace the result (output.overwrite_output_dir: true)"
    )
    check_result(ended, config(lora={"r": 8}, output={"overwrite_output_dir": True}))
    ended.settings.unlink()
    with pytest.raises(ConfigError, match="--resume: expected a checkpoint in .*, given none beside .*/adapter; name"):
        check_result(ended, config())
    ended.result.rmdir()
    check_result(ended, config())


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    stored = {"config": settings(), "model": "m", "data": "d", "position": {}}
    checkpoints = Checkpoints(tmp_path, keep=3, extra=lambda step: stored)
    for step in (1, 2, 3):
        checkpoints.save({"a": jnp.full(3, step, jnp.float32)}, Progress(step))
        checkpoints.wait()
    (tmp_path / "3" / "_CHECKPOINT_METADATA").unlink()
    for file in (tmp_path / "2" / "state").rglob("*"):
        if file.is_file() and "manifest" in file.name:
            file.write_bytes(b"damaged")
    (tmp_path / "999").mkdir()
    console = Console(file=io.StringIO(), width=300)
    load = partial(checkpoints.load, like={"a": jnp.zeros(3)})
    found = newest(checkpoints, console)
    assert found is not None and found.progress.step == 2
    for step in (999, 3):
        assert f"warning: {tmp_path}/{step} cannot be read: _CHECKPOINT_METADATA is missing" in console.file.getvalue()
    found, state = restore(checkpoints, found, load, console)
    assert found.progress.step == 1 and state["a"].tolist() == [1, 1, 1]
    assert "/2 cannot be read" in console.file.getvalue() and f"going on from {tmp_path}/1" in console.file.getvalue()
    for file in (tmp_path / "1" / "state").rglob("*"):
        if file.is_file() and "manifest" in file.name:
            file.write_bytes(b"damaged")
    with pytest.raises(TrainingError, match="/1 cannot be read: the array a .*; there is no earlier checkpoint"):
        restore(checkpoints, found, load, console)
    checkpoints.close()


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again_over_them(tmp_path):
    checkpoints, console = Checkpoints(tmp_path), Console(file=io.StringIO(), width=300)
    assert newest(checkpoints, console) is None
    for step in (7, 9):
        (tmp_path / str(step)).mkdir()
    with pytest.raises(TrainingError) as error:
        newest(checkpoints, console)
    assert str(error.value) == (
        f"{tmp_path}/9 cannot be read: _CHECKPOINT_METADATA is missing; nor can the 1 before it. Name another folder, "
        "or begin again in its place (output.overwrite_output_dir: true, without --resume)"
    )
    checkpoints.close()


def test_a_checkpoint_of_before_the_checksums_is_gone_on_from_with_a_warning(tmp_path):
    stored = {"config": settings(), "model": "m", "data": "d", "position": {}}
    checkpoints = Checkpoints(tmp_path, extra=lambda step: stored)
    checkpoints.save({"a": jnp.ones(3)}, Progress(7))
    checkpoints.wait()
    checkpoints.close()
    file = tmp_path / "7" / "_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    content["custom_metadata"]["format"] = 1
    for name in ("checksums", "checksum"):
        content["custom_metadata"].pop(name, None)
    file.write_text(json.dumps(content))
    console = Console(file=io.StringIO(), width=300)
    found = newest(checkpoints, console)
    assert found is not None and not found.checked
    found, state = restore(checkpoints, found, partial(checkpoints.load, like={"a": jnp.zeros(3)}), console)
    assert found.progress.step == 7 and state["a"].tolist() == [1, 1, 1]
    assert f"warning: {tmp_path}/7 was written without checksums" in console.file.getvalue()
