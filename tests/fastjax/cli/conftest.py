"""The model and the conversations of `chat`, and imports of other tools' settings."""

import json

import pytest
import yaml

from fastjax.cli import main
from fastjax.commands.settings import parse_train_config
from tests.support import chat, tiny
from tests.support.other_tools import INFO


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """A run that takes one of the fake devices, whatever their number."""
    monkeypatch.setattr("fastjax.runs.mesh.device_count", lambda: 1)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """The folder of the model."""
    return chat.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def one_layer_folder(tmp_path_factory):
    """The folder of a model of one layer, whose programs compile in less time."""
    config = tiny.config(num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    return chat.write_model(tmp_path_factory.mktemp("models") / "small", config)


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A file of forty conversations."""
    return chat.write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture
def run_file(chat_folder, chats, tmp_path):
    """Writes the settings of a run, after changes to its sections in their order, into a file."""

    def write(*defaults, **changes):
        content = {
            "model": {"model_name": str(chat_folder), "max_seq_length": 64, "dtype": "float32"},
            "data": {"train": str(chats), "cache_dir": None},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
            "output": {"output_dir": str(tmp_path / "run")},
        }
        for sections in (*defaults, changes):
            content |= {name: content.get(name, {}) | values for name, values in sections.items()}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
        return str(tmp_path / "run.yaml")

    return write


def write_theirs(folder, content, info):
    """The file of another tool, and the data sets beside it that LLaMA-Factory's names."""
    (folder / "theirs.yml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    if info is not None:
        (folder / "dataset_info.json").write_text(json.dumps(info))


@pytest.fixture
def imported(tmp_path, monkeypatch, capsys):
    """Imports a text and gives the settings with what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(text, *options, info=INFO):
        write_theirs(tmp_path, text, info)
        status = main(["import-config", "theirs.yml", *options])
        out, err = capsys.readouterr()
        assert status == 0, err
        return parse_train_config(["--config", "run.yaml"]), out

    return run


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Gives the error of an import, after which no file is there."""
    monkeypatch.chdir(tmp_path)

    def run(text, *options, info=INFO):
        write_theirs(tmp_path, text, info)
        assert main(["import-config", "theirs.yml", *options]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".json") == ["theirs.yml"]
        return err

    return run
