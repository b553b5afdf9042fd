"""Whole or nothing: what stands under the final name after success, failure and a full disk."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from convert.errors import ConvertError
from convert.files import atomic_file, atomic_folder, parse_json, remove_unfinished


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_new_folder_appears_whole(tmp_path):
    target = tmp_path / "deep" / "er" / "out"
    with atomic_folder(target) as temporary:
        (temporary / "a").write_text("1")
        assert not target.exists()
    assert contents(target) == {"a": "1"}
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_an_existing_folder_keeps_other_files_and_loses_stale_ones(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "metrics.jsonl"):
        (target / name).write_text("old")
    with atomic_folder(target, replaces=("model-*",)) as temporary:
        (temporary / "model-00001-of-00002.safetensors").write_text("new")
    assert contents(target) == {"model-00001-of-00002.safetensors": "new", "metrics.jsonl": "old"}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_failure_leaves_everything_as_it_was(tmp_path, exists, error):
    target = tmp_path / "out"
    if exists:
        target.mkdir()
        (target / "model.safetensors").write_text("old")
    with pytest.raises(type(error)), atomic_folder(target, replaces=("*",)) as temporary:
        (temporary / "model.safetensors").write_text("half")
        raise error
    if exists:
        assert contents(target) == {"model.safetensors": "old"}
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if exists else [])


def test_a_full_disk_at_the_flush_names_the_folder(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left.*nothing half-written.*out") as caught:
        with atomic_folder(tmp_path / "out") as temporary:
            (temporary / "a").write_text("1")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left.*file"):
        with atomic_file(tmp_path / "file") as stream:
            stream.write(b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exists", [False, True])
def test_every_file_is_flushed_before_anything_is_renamed(tmp_path, monkeypatch, exists):
    events = []

    def record(name):
        original = getattr(os, name)

        def wrapped(first, *rest):
            path = os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else str(first)
            events.append((name == "fsync", os.path.basename(path)))
            return original(first, *rest)

        monkeypatch.setattr(os, name, wrapped)

    if exists:
        (tmp_path / "out").mkdir()
    for name in ("fsync", "rename", "replace"):
        record(name)
    with atomic_folder(tmp_path / "out") as temporary:
        for name in ("a", "b"):
            (temporary / name).write_text("1")
    renames = [index for index, (flushed, _) in enumerate(events) if not flushed]
    before, after = events[: renames[0]], events[renames[-1] + 1 :]
    assert {(True, "a"), (True, "b")} <= set(before)
    assert after == [(True, "out" if exists else tmp_path.name)]


def test_other_errors_of_the_system_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"), atomic_folder(tmp_path / "out"):
        open(tmp_path / "absent")


def test_a_file_is_replaced_whole(tmp_path):
    target = tmp_path / "state.json"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_file(target) as stream:
        stream.write(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    with atomic_file(target) as stream:
        stream.write(b"new")
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_what_killed_processes_left_is_removed(tmp_path):
    """A process is killed inside of each kind of write; what only looks alike stays."""
    (tmp_path / "there").mkdir()
    code = (
        "import os, signal, sys\nfrom convert import files\n"
        "with getattr(files, sys.argv[1])(sys.argv[2]) as temporary:\n"
        "    sys.argv[1] == 'atomic_folder' and (temporary / 'a').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for write, target in (("atomic_folder", "new"), ("atomic_folder", "there"), ("atomic_file", "file")):
        command = [sys.executable, "-c", code, write, str(tmp_path / target)]
        assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    alike = [".mine.partial", ".mine.1-2.partial", "a.1-0123abcd.partial"]
    for name in alike:
        (tmp_path / name).write_text("kept")
    assert len(list(tmp_path.iterdir())) == 6 and len(list((tmp_path / "there").iterdir())) == 1
    for place in (tmp_path, tmp_path / "there", tmp_path / "absent"):
        remove_unfinished(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*sorted(alike), "there"]
    assert list((tmp_path / "there").iterdir()) == []


def test_folders_and_files_get_ordinary_permissions(tmp_path):
    with atomic_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("1")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b"\xff{}", b'{"a":1,"a":2}', b"[" * 100_000, b'{"a":' * 100_000])
def test_bytes_that_are_no_json_object(raw):
    with pytest.raises(ConvertError, match="some/file: part"):
        parse_json(raw, "some/file", "part")


def test_a_link_to_a_file_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real", tmp_path / "link"
    link.symlink_to(real)
    for text in (b"1", b"2"):
        with atomic_file(link) as stream:
            stream.write(text)
        assert link.is_symlink() and real.read_bytes() == text
    assert [path.name for path in real.parent.iterdir()] == ["real"]
