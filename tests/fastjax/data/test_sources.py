import json
import re

import pytest

from fastjax.data import ChatRecord, DataSource, TextRecord, read_jsonl
from fastjax.data.sources import given_rows, open_sources
from fastjax.errors import ConfigError, DataError


def write(folder, *lines):
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_reads_texts_and_conversations_in_order(tmp_path):
    path = write(
        tmp_path,
        b"\xef\xbb\xbf" + b'{"text": "one", "id": 3}',
        "",
        '{"messages": [{"role": "user", "content": "hé", "name": null}, {"role": "assistant", "content": ""}]}',
    )
    text, chat = read_jsonl(path)
    assert text == TextRecord("one", f"{path}:1")
    assert chat == ChatRecord([{"role": "user", "content": "hé"}, {"role": "assistant", "content": ""}], f"{path}:3")


def test_reads_several_files_one_after_the_other(tmp_path):
    paths = [tmp_path / name for name in ("b.jsonl", "a.jsonl")]
    for path in paths:
        path.write_text(f'{{"text": "{path.name}"}}\n')
    assert [record.text for record in read_jsonl(paths)] == ["b.jsonl", "a.jsonl"]


def test_what_is_wrong_is_named_with_file_and_line(tmp_path):
    path = write(tmp_path, '{"text": "fine"}', '{"text": 3}')
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}:2: 'text' must be a string, found 3"):
        list(read_jsonl(path))


def texts(source, **options):
    (found,) = open_sources(source)
    return [record.text for record in found.records(**options)]


@pytest.fixture
def ten(write_rows):
    return write_rows("ten.jsonl", [{"text": str(n)} for n in range(10)])


def test_columns_hold_for_every_data_set_that_does_not_say(ten):
    """Files, descriptions and rows in memory alike."""
    own, shared = {"text": "c"}, {"text": "t"}
    given = [str(ten), DataSource(str(ten)), DataSource(str(ten), columns=own), [{"t": "a"}]]
    assert [found.source.columns for found in open_sources(given, shared)] == [shared, shared, own, shared]
    with pytest.raises(ConfigError, match="columns: answer: unknown"):
        open_sources(given, {"answer": "a"})


def test_patterns_and_slices(ten, write_rows, tmp_path):
    write_rows("other.jsonl", [{"text": "a"}])
    (tmp_path / "notes.txt").write_text("no data")
    assert texts(f"{tmp_path}/*") == ["a", *map(str, range(10))]
    assert texts(DataSource(str(tmp_path), data_files=["t*.jsonl", "other.jsonl"])) == [*map(str, range(10)), "a"]
    slices = {"[:2]": "01", "[8:]": "89", "[-2:]": "89", "[:-7]": "012", "[:20%]": "01", "[25%:50%]": "234", "[:]": ""}
    for split, expected in slices.items():
        assert texts(DataSource(str(ten), split=f"train{split}")) == list(expected or "0123456789")
    assert texts(DataSource(str(ten), split="train[5:]"), skip=3) == ["8", "9"]


def test_identity_is_of_the_contents(ten, tmp_path):
    def identity(path, **options):
        (found,) = open_sources(DataSource(str(path), **options))
        return found.identity()

    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(ten.read_bytes())
    assert identity(ten) == identity(copy) == identity(ten, weight=2.0)
    others = [identity(ten, split="train[:5]"), identity(ten, columns={"text": "text"})]
    copy.write_bytes(ten.read_bytes().replace(b"9", b"8"))
    assert len({identity(ten), identity(copy), *others}) == 4


def test_a_folder_has_splits_as_datasets_finds_them(write_rows, tmp_path):
    write_rows("train.jsonl", [{"text": "train"}] * 4)
    write_rows("test.jsonl", [{"text": "test"}])
    assert texts(str(tmp_path)) == ["train"] * 4
    assert texts(DataSource(str(tmp_path), split="test")) == ["test"]
    assert texts(DataSource(str(tmp_path), split="train[:50%]")) == ["train"] * 2
    (source,) = open_sources(str(tmp_path))
    assert [record.where for record in source.records()][:1] == [f"{tmp_path}/train.jsonl:1"]
    with pytest.raises(DataError, match="datasets.load_dataset cannot read it: .*val"):
        open_sources(DataSource(str(tmp_path), split="val"))


@pytest.mark.parametrize("streaming", [False, True])
def test_what_datasets_loads(write_rows, tmp_path, streaming):
    """A combination of splits is left to `datasets`, which also reads names on the hub."""
    write_rows("train.jsonl", [{"text": f"train {n}", "extra": None} for n in range(3)])
    write_rows("test.jsonl", [{"text": "test", "extra": None}])
    split = "train" if streaming else "train+test"
    (source,) = open_sources(DataSource(str(tmp_path), split=split), streaming=streaming)
    found = list(source.records(skip=1))
    if not streaming:
        assert found[0] == TextRecord("train 1", f"{tmp_path}[train+test] row 1")
        assert found[-1].text == "test" and source.files is None
        assert len(source.identity()) == 64
    assert [record.text for record in found][:2] == ["train 1", "train 2"]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("none.jsonl", FileNotFoundError, "no such file or folder"),
        ("./none", FileNotFoundError, "no such file or folder"),
        ("none*.jsonl", FileNotFoundError, "no file that ends in .* matches the pattern"),
        (DataSource("ten.jsonl", split="test"), ConfigError, "split: expected train, or a part of it .* got test"),
        (DataSource("ten.jsonl", split=f"train[:{'9' * 5000}]"), ConfigError, "split: expected train, or a part of it"),
        (DataSource("ten.jsonl", name="main"), ConfigError, "name: expected none for files, got main"),
        (DataSource("ten.jsonl", data_files=["a"]), ConfigError, "data_files: expected null for a file, got"),
        (DataSource(".", data_files=["ten.jsonl", "no.*"]), FileNotFoundError, "no file that ends in .* this name"),
        ("notes.txt", ConfigError, "expected a file that ends in .jsonl"),
        ("someone/something", DataError, "someone/something: datasets.load_dataset cannot read it"),
        ([], ConfigError, "expected at least one data set, got none"),
    ],
)
def test_what_is_not_there_is_said(ten, tmp_path, monkeypatch, source, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no data")
    with pytest.raises(error, match=message):
        open_sources(source)


def test_rows_in_memory_have_the_nulls_that_were_written(tmp_path):
    """As from a file; in Arrow's tables a null may be a field that another row has."""
    arguments = {"q": "a", "limit": None, "inner": [{"x": None}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    row = {"messages": [{"role": "user", "content": "x"}, call], "tools": None}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for source in (open_sources(tmp_path / "rows.jsonl")[0], given_rows([row], "rows")):
        (record,) = source.records()
        assert record.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
        assert "content" not in record.messages[1] and record.tools is None
