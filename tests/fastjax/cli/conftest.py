"""The model and the conversations of `chat`, and one cache of compiled programs."""

import jax
import pytest

from tests.support import chat


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Runs of the same shapes take their programs from a cache: most of a short run is compilation."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """The folder of the model."""
    return chat.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A file of forty conversations."""
    return chat.write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")
