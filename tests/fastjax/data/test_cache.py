import errno
import re
import shutil

import numpy as np
import pytest

from fastjax.data import Batches, DataSource, StreamedBatches, prepare
from fastjax.data import cache as cache_module
from tests.support.data import uncached


@pytest.fixture
def file(write_rows):
    return write_rows("rows.jsonl", [{"prompt": f"the user {n} ", "completion": "the answer" * n} for n in range(1, 9)])


@pytest.fixture
def prepared(file, tmp_path, make_tokenizer):
    tokenizer = make_tokenizer("chatml")

    def run(source=file, length=32, progress=None, **options):
        given = uncached(**({"cache_dir": str(tmp_path / "cache")} | options))
        return prepare(source, tokenizer, length, given, progress=progress)

    return run


def same(one, other):
    assert one.statistics == other.statistics and one.fingerprint == other.fingerprint
    assert one.max_token_id == other.max_token_id
    for ours, theirs in zip(Batches(one.rows, 2).epoch(), Batches(other.rows, 2).epoch(), strict=True):
        for array, expected in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(array, expected)
    rows = np.arange(len(one.rows))
    assert Batches(one.rows, 2).describe_rows(rows) == Batches(other.rows, 2).describe_rows(rows)


def test_the_second_time_rows_come_from_the_cache_mapped(prepared, file):
    first, second = prepared(too_long="split"), prepared(too_long="split")
    assert (first.from_cache, second.from_cache) == (False, True)
    assert isinstance(second.rows.documents.tokens, np.memmap)
    same(first, second)
    same(first, prepared(too_long="split", cache_dir=None))
    named = Batches(second.rows, 2).describe_rows(np.arange(len(second.rows)))
    assert re.search(rf"{re.escape(str(file))}:(\d+, )*8\b", named)


def test_the_time_that_a_template_tells_stays(write_rows, tmp_path, make_tokenizer, templates):
    """That of the first run, unless a run goes on that had another: it gets its own data, from files and streams."""
    first, later = "2024-07-26T12:00:00", "2024-08-05T07:30:00"
    tokenizer = make_tokenizer("{{ strftime_now('%d %H') }}" + templates["chatml"])
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": n * "b"}] for n in range(1, 9)]
    file = write_rows("chats.jsonl", [{"messages": chat} for chat in chats])

    def run(now):
        return prepare(file, tokenizer, 64, uncached(cache_dir=str(tmp_path / "cache")), now=now)

    made, kept, other, again = run(first), run(None), run(later), run(first)
    assert [data.from_cache for data in (made, kept, other, again)] == [False, True, False, False]
    assert [data.now for data in (made, kept, other, again)] == [first, first, later, first]
    same(made, kept)
    same(made, again)
    assert made.fingerprint != other.fingerprint
    for now in (first, later):
        batch = next(StreamedBatches(file, tokenizer, 64, 1, now=now).from_step())
        assert f"{now[8:10]} {now[11:13]}" in tokenizer.decode(batch.tokens[0, 0])
    assert prepare(file, make_tokenizer("chatml"), 64, now=later).now is None  # nothing of it is in the data


def test_whatever_shapes_the_rows_makes_another_entry(prepared, file, tmp_path, make_tokenizer):
    prepared()
    options = [
        {"length": 31},
        {"loss_on": "all"},
        {"too_long": "drop"},
        {"packing": False},
        {"chat_template": "plain"},
        {"source": DataSource(str(file), split="train[:4]")},
        {"source": [file, file]},
    ]
    seen = set()
    for changed in options:
        dataset = prepared(**changed)
        assert not dataset.from_cache, changed
        seen.add(dataset.fingerprint)
    assert len(seen) == len(options)
    before = file.stat()
    file.write_text(file.read_text().replace("user 1", "user 7"))
    assert file.stat().st_size == before.st_size and not prepared().from_cache
    other = make_tokenizer("chatml")
    other.add_tokens(["answer"])
    assert not prepare(file, other, 32, uncached(cache_dir=str(tmp_path / "cache"))).from_cache


def test_the_fingerprint_is_of_the_rows_not_of_the_place(prepared, file, tmp_path):
    moved = tmp_path / "moved.jsonl"
    shutil.copy(file, moved)
    assert prepared(moved).fingerprint == prepared().fingerprint


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no meta", "broken meta"])
def test_a_damaged_entry_is_made_again(prepared, tmp_path, damage):
    first = prepared()
    (entry,) = (tmp_path / "cache").iterdir()
    tokens, meta = entry / "documents.tokens.npy", entry / "meta.json"
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-8])
    elif damage == "changed":
        tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x01")
    elif damage == "missing":
        tokens.unlink()
    elif damage == "no meta":
        meta.unlink()
    else:
        meta.write_text(meta.read_text()[:-20])
    again = prepared()
    assert not again.from_cache
    same(first, again)
    assert prepared().from_cache


def test_a_cache_that_cannot_be_written_is_said_and_no_failure(prepared, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the prepared data are not kept for the next run: .*file"):
        assert len(prepared(cache_dir=str(tmp_path / "file" / "cache")).rows)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module.np, "save", full)
    said = []
    assert len(prepared(progress=said.append).rows)
    assert len(said) == 1 and "No space left" in said[0]
    assert not list((tmp_path / "cache").iterdir())
