"""The model and the conversations of `chat`."""

import pytest

from tests.support import chat


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """A run that takes one of the fake devices, whatever their number."""
    monkeypatch.setattr("fastjax.runs.mesh.device_count", lambda: 1)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """The folder of the model."""
    return chat.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A file of forty conversations."""
    return chat.write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")
