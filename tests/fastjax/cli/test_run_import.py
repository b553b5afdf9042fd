"""`fastjax convert adapter` from a PEFT folder: a run that goes on from it, and the way back, bit for bit."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from fastjax.cli import main
from fastjax.language_model import FastLanguageModel
from fastjax.training.checkpoint import Checkpoints
from tests.support.folders import read_adapter


@pytest.fixture
def settings(run_file):
    """A file with the settings of a run."""

    def write(lora=None, **model):
        sections = {"model": model, "training": {"max_steps": 2}, "optimizer": {"warmup_steps": 0}}
        return run_file(**sections, output={"report_to": []}, **({} if lora is None else {"lora": lora}))

    return write


@pytest.fixture
def adapter(chat_folder, tmp_path):
    """A PEFT folder whose arrays are all random."""

    def make(**options):
        model, _ = FastLanguageModel.from_pretrained(chat_folder, 64, dtype="float32", load_in_4bit=False)
        model = FastLanguageModel.get_peft_model(model, **{"r": 4, "target_modules": ["q_proj", "up_proj"], **options})
        leaves, structure = jax.tree.flatten(model.trainable)
        keys = jax.random.split(jax.random.key(5), len(leaves))
        noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        model.replace(trainable=jax.tree.unflatten(structure, noisy)).save_pretrained(tmp_path / "peft")
        return tmp_path / "peft"

    return make


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


KINDS = {
    "DoRA": {"use_dora": True, "lora_dropout": 0.25},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.mlp.up_proj": 5.0}, "use_rslora": True},
    "tables": {"modules_to_save": ["embed_tokens", "lm_head"], "layers_to_transform": [1]},
    "tokens": {"trainable_token_indices": [3, 7]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(settings, adapter, tmp_path, kind):
    peft, run = adapter(**KINDS[kind]), tmp_path / "run"
    assert main(["convert", "adapter", str(peft), str(run), "--config", settings()]) == 0
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]
    checkpoints = Checkpoints(run / "checkpoints")
    try:
        assert checkpoints.steps() == [0]
        assert checkpoints.metadata(0)["progress"]["step"] == 0
    finally:
        checkpoints.close()
    assert main(["convert", "adapter", str(run), str(tmp_path / "back")]) == 0
    (before, first), (after, second) = read_adapter(peft), read_adapter(tmp_path / "back")
    assert set(first) == set(second)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], name)
    same = {"base_model_name_or_path": None}
    assert dataclasses.replace(before, **same) == dataclasses.replace(after, **same)


def test_a_damaged_checkpoint_is_passed_over(settings, adapter, tmp_path, capsys):
    """One whose metadata are gone, and one whose arrays are."""
    run = tmp_path / "run"
    assert main(["convert", "adapter", str(adapter()), str(run), "--config", settings()]) == 0
    (run / "checkpoints" / "7").mkdir()
    assert main(["convert", "adapter", str(run), str(tmp_path / "back")]) == 0
    printed = capsys.readouterr()
    assert "checkpoints/7 cannot be read: _CHECKPOINT_METADATA is missing" in " ".join(printed.err.split())
    assert "had learnt after step 0" in printed.out and (tmp_path / "back").is_dir()
    assert main(["convert", "adapter", str(run), str(tmp_path / "again"), "--step", "7"]) == 1
    assert "checkpoints/7 cannot be read: _CHECKPOINT_METADATA is missing" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints" / "0" / "state")
    assert main(["convert", "adapter", str(run), str(tmp_path / "again"), "--step", "0"]) == 1
    assert not (tmp_path / "again").exists()


@pytest.mark.older_jax
def test_training_goes_on_from_it_as_from_the_folder(settings, adapter, tmp_path):
    peft, run, other = adapter(), tmp_path / "run", tmp_path / "other"
    same = {"r": 4, "target_modules": ["up_proj", "q_proj"]}
    assert main(["convert", "adapter", str(peft), str(run), "--config", settings(same)]) == 0
    assert main(["train", "--config", str(run / "config.yaml"), "--resume"]) == 0
    assert (run / "adapter").is_dir()
    file = settings({"adapter": str(peft)})
    assert main(["train", "--config", file, "--output.output_dir", str(other)]) == 0
    assert losses(run) == losses(other) and len(losses(run)) == 2


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"r": 8}, {}, "r: expected 4, got 8"),
        ({"target_modules": ["q_proj"]}, {}, "target_modules: expected ['q_proj', 'up_proj'], got ['q_proj']"),
        ({"use_dora": True}, {}, "use_dora: expected False, got True"),
        ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save: expected ['lm_head'], got None"),
    ],
)
def test_an_adapter_that_is_not_the_runs(settings, adapter, tmp_path, capsys, changes, options, message):
    run, peft = tmp_path / "run", str(adapter(**options))
    lora = {"r": 4, "target_modules": ["up_proj", "q_proj"], **changes}
    assert main(["convert", "adapter", peft, str(run), "--config", settings(lora)]) == 2
    assert f"expected an adapter as the section lora says: {message}; leave the section" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft", "run.yaml"]


def test_arguments_that_do_not_fit(settings, adapter, tmp_path, capsys):
    peft, run = adapter(), tmp_path / "run"

    def refused(*arguments, status=1):
        assert main(["convert", "adapter", *map(str, arguments)]) == status
        return capsys.readouterr().err

    assert "--config: expected the settings of the run" in refused(peft, run)
    assert "--step, --force: expected none" in refused(peft, run, "--config", settings(), "--force")
    assert "expected the output folder of a run, with config.yaml, or an adapter" in refused(tmp_path, run)
    assert "no such folder" in refused(tmp_path / "nothing", run)
    full = settings(full_finetuning=True, load_in_4bit=False)
    assert "model.full_finetuning: expected false" in refused(peft, run, "--config", full, status=2)
    run.mkdir()
    assert "expected a new folder for the run" in refused(peft, run, "--config", settings(), status=2)
    (run / "config.yaml").write_text("")
    assert "--config: expected none, since" in refused(run, tmp_path / "out", "--config", settings())


def test_nothing_is_left_of_what_could_not_be_written(settings, adapter, tmp_path, monkeypatch, capsys):
    peft = adapter()

    def full(self, state, progress):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    assert main(["convert", "adapter", str(peft), str(tmp_path / "run"), "--config", settings()]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft", "run.yaml"]
