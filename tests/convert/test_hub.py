"""Names on the hub: from the cache while offline, at the revision that is asked for, and never another repository."""

import types

import huggingface_hub
import pytest
from huggingface_hub import constants

from convert.errors import ConvertError
from convert.hub import Source, fetch, split

FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with two commits of org/model, the second of which is main, as huggingface_hub lays it out."""
    home = tmp_path / "hub" / "models--org--model"
    for commit in (FIRST, SECOND):
        (home / "snapshots" / commit).mkdir(parents=True)
        (home / "snapshots" / commit / "config.json").write_text(commit)
    for name, commit in (("main", SECOND), ("v1", FIRST)):
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home


@pytest.mark.parametrize(("revision", "commit"), [(None, SECOND), ("main", SECOND), ("v1", FIRST), (FIRST, FIRST)])
def test_from_the_cache(cache, revision, commit):
    found = fetch("org/model", revision)
    assert found == Source(cache / "snapshots" / commit, "org/model", commit)
    assert (found.folder / "config.json").read_text() == commit


def test_what_is_not_in_the_cache(cache):
    with pytest.raises(
        ConvertError, match=r"org/other: no such folder, and not in the hub's cache, which is all there"
    ):
        fetch("org/other")
    with pytest.raises(ConvertError, match=r"org/model: no such folder, and not at v2 in the hub's cache"):
        fetch("org/model", "v2")


@pytest.mark.parametrize("name", ["../model", "./model", "/model", "a/b/c", "a//b", "model", "~/model", "a\\b/c", ""])
def test_what_is_no_name_is_not_asked_for(cache, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *given, **named: pytest.fail("asked for"))
    if name:
        with pytest.raises(ConvertError, match="no such folder"):
            fetch(name)
    else:
        assert fetch(name).name is None  # the current folder, as everywhere


@pytest.mark.parametrize("name", [None, 3])
def test_what_is_no_name_at_all(name):
    with pytest.raises(ConvertError, match=f"expected a folder or a name on the hub, org/model, got {name!r}$"):
        fetch(name)


def test_a_name_that_is_none(cache):
    with pytest.raises(ConvertError, match="org name/mo del: no such folder, and the hub does not give it"):
        fetch("org name/mo del")


def test_a_folder_is_itself(tmp_path):
    assert fetch(tmp_path) == Source(tmp_path)
    with pytest.raises(ConvertError, match="revision: expected none, since this is a folder, got v1"):
        fetch(tmp_path, "v1")


def test_online_the_commit_is_pinned_and_a_renamed_repository_refused(cache, monkeypatch):
    asked, skipped = [], []
    info = types.SimpleNamespace(id="org/model", sha=FIRST)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, revision=None: info)

    def download(name, **options):
        asked.append((name, options["revision"], options["local_files_only"]))
        skipped.append([pattern for pattern in options["ignore_patterns"] if pattern in options["allow_patterns"]])
        return str(cache / "snapshots" / FIRST)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch("org/model").revision == FIRST
    assert fetch("org/model", weights=False).revision == FIRST
    assert asked == [("org/model", FIRST, False)] * 2 and skipped == [[], ["*.safetensors"]]
    info.id = "elsewhere/model"
    with pytest.raises(ConvertError, match="org/model: this repository is called elsewhere/model now"):
        fetch("org/model")
    assert len(asked) == 2


def test_a_revision_in_the_name(cache, tmp_path):
    found = fetch("org/model@v1")
    assert found == Source(cache / "snapshots" / FIRST, "org/model", FIRST)
    assert found.pinned == f"org/model@{FIRST}" and fetch(found.pinned) == found
    assert (split("org/model@v1"), split("org/model")) == (("org/model", "v1"), ("org/model", None))
    with pytest.raises(ConvertError, match="org/model@v1: revision: expected one, got v1 and main"):
        fetch("org/model@v1", "main")
    (tmp_path / "a@b").mkdir()
    assert fetch(tmp_path / "a@b").pinned == str(tmp_path / "a@b")


def test_a_hub_that_does_not_answer(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    class ConnectError(Exception):
        """The HTTP library's own, which is no OSError."""

    def model_info(self, name, revision=None):
        raise ConnectError("[Errno 111] Connection refused")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(ConvertError, match=r"the hub does not answer: \[Errno 111\].*; HF_HUB_OFFLINE=1 takes what"):
        fetch("org/model")


@pytest.mark.parametrize("name", ["x" * 10_000, f"org/{'x' * 10_000}", "a\0b", "org/a\0b"])
def test_names_that_cannot_be_any(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConvertError) as error:
        fetch(name)
    assert len(str(error.value)) < 800
