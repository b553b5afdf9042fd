"""The result of a run: finished or not, damaged or not, and not replaced unasked."""

import json

import pytest

from fastjax.errors import ConfigError
from fastjax.runs.folder import RunFolder
from fastjax.runs.result import check_result, damage, finished, weight_digests
from tests.support.runs import config


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
        "with others: lora.r: expected 16, got 8; training.seed: expected 3407, got 1. Go back to them, name "
        "another folder, or replace the result (output.overwrite_output_dir: true)"
    )
    check_result(ended, config(lora={"r": 8}, output={"overwrite_output_dir": True}))
    ended.settings.unlink()
    with pytest.raises(ConfigError, match="--resume: expected a checkpoint in .*, got none beside .*/adapter; name"):
        check_result(ended, config())
    ended.result.rmdir()
    check_result(ended, config())
