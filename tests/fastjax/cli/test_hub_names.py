"""`fastjax train` from names on the hub: through the cache, at a commit that the run's folder keeps."""

import shutil

import pytest
import yaml
from huggingface_hub import constants

from convert.hub import fetch
from fastjax.cli import main
from tests.support.folders import read_adapter

FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch, one_layer_folder):
    """A cache with the tiny model as org/model, as huggingface_hub lays it out; `main` is its first commit."""
    home = tmp_path / "hub" / "models--org--model"
    for commit in (FIRST, SECOND):
        shutil.copytree(one_layer_folder, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(FIRST)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home


@pytest.fixture
def train(tmp_path, chats):
    """Run `fastjax train` on a name, in the same output folder each time."""
    content = {
        "model": {"model_name": "org/model", "max_seq_length": 64, "dtype": "float32"},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "data": {"train": str(chats), "cache_dir": None},
        "optimizer": {"lr_scheduler_type": "constant"},  # one program whatever the number of steps
        "training": {"max_steps": 1},
        "output": {"output_dir": str(tmp_path / "run"), "report_to": []},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return lambda *options: main(["train", "--config", str(file), *options])


def kept(run):
    return yaml.safe_load((run / "config.yaml").read_text())


def test_the_commit_is_kept(cache, train, tmp_path, capsys):
    run = tmp_path / "run"
    assert train("--output.save_steps", "1") == 0
    assert kept(run)["model"]["model_name"] == f"org/model@{FIRST}"
    adapter, _ = read_adapter(run / "adapter")
    assert (adapter.base_model_name_or_path, adapter.revision) == ("org/model", FIRST)
    assert f"--model org/model@{FIRST}" in capsys.readouterr().out
    report = (run / "report.html").read_text()
    assert "org/model" in report and FIRST in report

    (cache / "refs" / "main").write_text(SECOND)
    assert train("--resume", "--training.max_steps", "2") == 0
    assert kept(run)["model"]["model_name"] == f"org/model@{FIRST}"
    capsys.readouterr()
    assert train("--resume", "--training.max_steps", "3", "--model.model_name", f"org/model@{SECOND}") == 2
    err = capsys.readouterr().err
    assert f"model.model_name: expected org/model@{FIRST}, with which the earlier run began, got" in err
    assert train("--output.output_dir", str(tmp_path / "new")) == 0
    assert kept(tmp_path / "new")["model"]["model_name"] == f"org/model@{SECOND}"

    exported = ["convert", "adapter", str(run), str(tmp_path / "out")]
    assert main(exported) == 0
    assert read_adapter(tmp_path / "out")[0].revision == FIRST


@pytest.mark.exhaustive(by="test_the_commit_is_kept")
def test_an_adapter_from_the_hub(cache, train, tmp_path):
    assert train() == 0
    home = tmp_path / "hub" / "models--org--adapter"
    shutil.copytree(tmp_path / "run" / "adapter", home / "snapshots" / SECOND)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(SECOND)
    file = tmp_path / "on.yaml"
    content = kept(tmp_path / "run") | {"lora": {"adapter": "org/adapter"}}
    content["output"]["output_dir"] = str(tmp_path / "on")
    file.write_text(yaml.safe_dump(content))
    assert main(["train", "--config", str(file)]) == 0
    assert kept(tmp_path / "on")["lora"]["adapter"] == f"org/adapter@{SECOND}"


@pytest.mark.parametrize("command", ["train", "preview"])
def test_what_is_not_there_is_named(cache, train, tmp_path, capsys, command):
    options = ["--config", str(tmp_path / "run.yaml"), "--model.model_name", "org/other@v1"]
    assert main([command, *options]) == 2
    err = capsys.readouterr().err
    assert (
        "model.model_name: expected a folder in Hugging Face format or a name on the hub, org/model: org/other" in err
    )
    assert err.count("\n") == 1
    with pytest.raises(Exception, match="not at v1 in the hub's cache"):
        fetch("org/other@v1")
