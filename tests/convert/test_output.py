"""Writing a folder: resumed after kills, refused where the place is taken, checked after it is written."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from convert import shard, unfinished
from convert.checkpoint import open_checkpoint, write_config
from convert.errors import ConvertError
from convert.output import Chunk, Job, write_folder


def job(name, size=1000, *, fail=None, made=None):
    def run():
        if made is not None:
            made.append(name)
        values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        for first in range(0, size, 300):
            if fail is not None:
                raise fail
            yield Chunk(name, first, values[first : first + 300])

    return Job({name: (np.dtype(np.float32), (size,))}, run)


def finish(folder):
    write_config(folder / "config.json", {"model_type": "llama"})


def write(folder, jobs, **options):
    options = {"made_from": {"a": 1}, "finish": finish, "max_shard_bytes": 9000, **options}
    return write_folder(folder, jobs, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def five(**options):
    return [job(f"t{number}", 1000 + number, **options) for number in range(5)]


def test_a_folder_in_shards(tmp_path):
    told = []
    result = write(tmp_path / "out", five(), monitor=lambda done, total: told.append((done, total)))
    assert (result.tensors, result.bytes, result.shards, result.kept) == (5, 4 * 5010, 3, 0)
    checkpoint = open_checkpoint(tmp_path / "out")
    for number in range(5):
        right = np.random.default_rng(1000 + number).standard_normal(1000 + number).astype(np.float32)
        assert checkpoint.read(f"t{number}").tobytes() == right.tobytes()
    assert told[-1][0] == told[-1][1] and sorted(told) == told
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupt(tmp_path, monkeypatch, shards):
    """Stop as a kill would, after so many shards; what is left stays."""

    class Killed(BaseException):
        pass

    original, count = unfinished.Unfinished.done, []

    def done(self, name, record):
        if len(count) == shards:
            raise Killed
        count.append(name)
        original(self, name, record)

    with monkeypatch.context() as patch:
        patch.setattr(unfinished.Unfinished, "done", done)
        with pytest.raises(Killed):
            write(tmp_path / "out", five())


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_what_was_finished_is_kept(tmp_path, monkeypatch, shards):
    write(tmp_path / "whole", five())
    interrupt(tmp_path, monkeypatch, shards)
    assert not (tmp_path / "out").exists()
    made = []
    result = write(tmp_path / "out", five(made=made))
    assert result.kept == shards and len(made) == max(0, 3 - 2 * shards)  # one was read back, and had no name yet
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("damage", ["bytes", "end", "record", "other"])
def test_what_was_damaged_or_is_of_another_conversion_is_made_anew(tmp_path, monkeypatch, damage):
    write(tmp_path / "whole", five())
    interrupt(tmp_path, monkeypatch, 2)
    home = tmp_path / ".out.converting"
    file = home / "folder" / "model-00001-of-00003.safetensors"
    if damage == "bytes":
        with open(file, "r+b") as stream:
            stream.seek(2000)
            stream.write(b"\xff\xff")
    elif damage == "end":
        os.truncate(file, file.stat().st_size - 8)
    elif damage == "record":
        (home / f"{file.name}.json").write_text('{"size": 1')
    result = write(tmp_path / "out", five(), made_from={"a": 1 + (damage == "other")})
    assert result.kept == (0 if damage == "other" else 1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_place_that_is_taken(tmp_path):
    write(tmp_path / "out", five()[:1])
    before = contents(tmp_path / "out")
    with pytest.raises(ConvertError, match="out: folder: expected a new one .--force or force=True replaces"):
        write(tmp_path / "out", five())
    assert contents(tmp_path / "out") == before
    write(tmp_path / "out", five(), force=True)
    assert len(open_checkpoint(tmp_path / "out").names) == 5
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConvertError, match=r"home: folder: expected a model folder with config\.json to replace"):
        write(tmp_path / "home", five(), force=True)
    assert (tmp_path / "home" / "thesis.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]


def test_a_second_process_is_refused(tmp_path):
    with (
        unfinished.Unfinished(tmp_path / "out").claimed(),
        pytest.raises(ConvertError, match="another process is converting"),
    ):
        write(tmp_path / "out", five())


@pytest.mark.parametrize("step", ["rename", "rmtree"])
def test_a_kill_between_the_last_steps(tmp_path, monkeypatch, step):
    """With an earlier folder to be replaced: before or after the new one has its name, running again ends it."""
    write(tmp_path / "out", five()[:2])
    original, calls = getattr(os if step == "rename" else shutil, step), []

    class Killed(BaseException):
        pass

    def killed(first, *rest, **named):
        if step == "rename" and str(first).endswith("folder"):
            raise Killed
        if step == "rmtree" and str(first).endswith(".converting"):
            calls.append(first)
            raise Killed
        return original(first, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os if step == "rename" else shutil, step, killed)
        with pytest.raises(Killed):
            write(tmp_path / "out", five(), force=True)
    write(tmp_path / "out", five(), force=step == "rename")
    assert len(open_checkpoint(tmp_path / "out").names) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: free._replace(free=10_000))
        with pytest.raises(OSError, match="bytes are needed and 10,000 are free") as caught:
            write(tmp_path / "out", five())
        assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(os, "pwrite", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="No space left.*nothing half-written") as caught:
        write(tmp_path / "out", five())
    assert caught.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("call", "together"), [("fsync", 2**27), ("fdatasync", 64)])
def test_what_is_read_back_must_be_what_was_written(tmp_path, monkeypatch, call, together):
    """Whether it is checked at the end or, a part at a time, before."""
    original = getattr(os, call)

    def faulty(descriptor):
        original(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part"):
            os.pwrite(descriptor, b"\x01", 1000)

    monkeypatch.setattr(os, call, faulty)
    monkeypatch.setattr(shard, "_CHECK", together)
    with pytest.raises(ConvertError, match="read back are not what was written; the disk or the memory is faulty"):
        write(tmp_path / "out", five())
    assert list(tmp_path.iterdir()) == []


def test_faults_of_jobs(tmp_path):
    with pytest.raises(ConvertError, match="got a second t1"):
        write(tmp_path / "out", [job("t1"), job("t1")])
    with pytest.raises(RuntimeError, match="stop"):
        write(tmp_path / "a", [*five(), job("t9", fail=RuntimeError("stop"))])
    short = Job({"t": (np.dtype(np.float32), (9,))}, lambda: iter([Chunk("t", 0, np.zeros(8, np.float32))]))
    with pytest.raises(ConvertError, match="not every tensor was made whole"):
        write(tmp_path / "b", [short])
    wrong = Job({"t": (np.dtype(np.float32), (9,))}, lambda: iter([Chunk("t", 0, np.zeros(9, np.float64))]))
    with pytest.raises(ConvertError, match="t: made as float64, planned as float32"):
        write(tmp_path / "c", [wrong])


SLOW = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.convert.test_output import five, write
import os
original = os.pwrite
def slow(*given):
    time.sleep(0.01)
    return original(*given)
os.pwrite = slow
print("begun", flush=True)
write(Path(sys.argv[1]), five())
"""


def test_killed_again_and_again(tmp_path, pytestconfig):
    write(tmp_path / "whole", five())
    draw = random.Random(0)
    command = [sys.executable, "-c", SLOW, str(tmp_path / "out"), str(pytestconfig.rootpath)]
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"begun\n"
        time.sleep(draw.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
        if (tmp_path / "out").exists():
            assert contents(tmp_path / "out") == contents(tmp_path / "whole")
            shutil.rmtree(tmp_path / "out")
    write(tmp_path / "out", five())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "llama"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("there", [True, False], ids=["a folder", "nothing yet"])
def test_a_link_to_a_folder_stays_a_link(tmp_path, there):
    (tmp_path / "deep").mkdir()
    real, link = tmp_path / "deep" / "real", tmp_path / "out"
    if there:
        write(real, [job("old")])
    link.symlink_to(real)
    if there:
        with pytest.raises(ConvertError, match="real: folder: expected a new one"):
            write(link, five())
    write(link, five(), force=there)
    assert link.is_symlink() and not real.is_symlink()
    assert set(open_checkpoint(real).names) == {f"t{number}" for number in range(5)}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["real"]
