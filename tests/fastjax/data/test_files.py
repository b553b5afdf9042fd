import bz2
import gzip
import json
import lzma

import pytest

from fastjax.data.files import read_rows
from fastjax.errors import ConfigError, DataError

ROWS = [{"text": "one"}, {"text": 'zwei\nDrei, "vier" é'}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".jsonl.bz2", ".json.xz"])
def test_json_lines_compressed_or_not(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(LINES))
    assert list(read_rows(path)) == [(row, f"{path}:{n}") for n, row in enumerate(ROWS, start=1)]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_with_lines(tmp_path, indent):
    path = tmp_path / "rows.json"
    path.write_text("\n " + json.dumps(ROWS, indent=indent))
    assert [row for row, _ in read_rows(path)] == ROWS
    assert [where for _, where in read_rows(path)] == [f"{path}:{n}" for n in ((2, 2) if indent is None else (3, 6))]
    path.write_text("[]")
    assert list(read_rows(path)) == []


def test_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbftext,n\none,1\n"zwei\nDrei, ""vier""",2\nlast,3\n')
    rows = list(read_rows(path))
    assert [row["text"] for row, _ in rows] == ["one", 'zwei\nDrei, "vier"', "last"]
    assert [where.rpartition(":")[2] for _, where in rows] == ["2", "3", "5"]


def test_parquet_without_the_nulls_of_its_schema(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": [{"role": "user", "content": "q"}]}, {"messages": [{"role": "tool", "tool_call_id": "1"}]}]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert list(read_rows(path)) == [(row, f"{path} row {n}") for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"a": 1},\n{"a": }]', r"a.json:2: not valid JSON at column 7"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', r"a.json:2: not valid JSON: expected ',' or '\]'"),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}]', r"a.json:2: not valid UTF-8"),
        ("a.json", b'[{"a": 1}', r"a.json:1: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', r"a.jsonl:2: not valid UTF-8 at byte 7"),
        ("a.csv", b"a,b\n1,2\n3\n", r"a.csv:3: expected 2 fields as in the first line, found 1"),
        ("a.csv", b'a,b\n1,2\n3,"', r"a.csv:3: not valid CSV"),
        ("a.csv", b"a\n\xff\n", r"a.csv:2: not valid UTF-8"),
        ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz: broken .gz file"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], r"a.jsonl.gz: broken .gz file"),
        ("a.parquet", b"no parquet", r"a.parquet: broken parquet file"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(path))


def test_an_unknown_suffix(tmp_path):
    with pytest.raises(ConfigError, match="expected a file that ends in .jsonl, .* given .txt"):
        list(read_rows(tmp_path / "a.txt"))
