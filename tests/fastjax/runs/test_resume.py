"""Checkpoints to resume from: damaged ones are passed over."""

import io
import json
from functools import partial

import jax.numpy as jnp
import pytest
from rich.console import Console

from fastjax.errors import TrainingError
from fastjax.runs.resume import newest, restore
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints

STORED = {"config": {"model": {"model_name": "m"}}, "model": "m", "data": "d", "position": {}}


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3, extra=lambda step: STORED)
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
    checkpoints = Checkpoints(tmp_path, extra=lambda step: STORED)
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
