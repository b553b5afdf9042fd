import bz2
import gzip
import json
import lzma

import numpy as np
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


def test_a_parquet_column_twice(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet: the same column twice: 'text'; give each a name"):
        list(read_rows(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"a": 1},\n{"a": }]', r"a.json:2: not valid JSON at column 7"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', r"a.json:2: not valid JSON: expected ',' or '\]'"),
        ("a.json", b'[{"a": 1},\n]', r"a.json:2: not valid JSON: expected a row behind ','"),
        ("a.json", b'[{"a": 1}]\n[{"a": 2}]', r"a.json:2: not valid JSON: something stands behind the array"),
        ("a.json", b"[] nonsense", r"a.json:1: not valid JSON: something stands behind the array"),
        ("a.json", b'[{"a": 1},\n{"a": 2, "b": 3,\n"a": 4}]', r"a.json:3: not valid JSON at column 1: .*twice: a"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2, "a": 3}', r"a.jsonl:2: not valid JSON at column 10: the same key twice: a"),
        ("a.jsonl", b'{"a": 1} {"a": 2}', r"a.jsonl:1: not valid JSON at column 10: something stands behind the v"),
        ("a.csv", b"a,b,a\n1,2,3\n", r"a.csv:1: the same column twice: 'a'; give each a name of its own"),
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


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".parquet"])
def test_damage_is_told_with_the_name_of_the_file(tmp_path, suffix):
    """Flipped bytes and cuts, where each library has another exception, some without the file's name."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        table = pyarrow.Table.from_pylist([{"text": f"{n} é", "n": n, "m": [{"role": "x"}] * n} for n in range(9)])
        pyarrow.parquet.write_table(table, path)
    else:
        lines = b"".join(b'{"text": "%d"}\n' % n for n in range(200))
        path.write_bytes({".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[path.suffix](lines))
    whole, told = path.read_bytes(), set()
    random = np.random.default_rng(0)
    for place in random.integers(len(whole), size=80):
        broken = bytearray(whole)
        broken[place] ^= 1 << random.integers(8)
        path.write_bytes(whole[:place] if random.random() < 0.2 else broken)
        try:
            list(read_rows(path))
        except DataError as error:
            assert str(path) in str(error)
            told.add(str(error).replace(str(path), ""))
    assert told


def test_a_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("fastjax.data.files.MAX_LINE_BYTES", 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' + bytes(10**6)))
    with pytest.raises(DataError, match=r"a.jsonl.gz:2: a line of more than 1000 bytes"):
        list(read_rows(tmp_path / "a.jsonl.gz"))
    (tmp_path / "a.csv").write_bytes(b'a\n"' + b"b\n" * 1000)
    with pytest.raises(DataError, match=r"a.csv:\d+: not valid CSV: field larger than field limit"):
        list(read_rows(tmp_path / "a.csv"))


def test_an_unknown_suffix(tmp_path):
    with pytest.raises(ConfigError, match="expected a file that ends in .jsonl, .* got .txt"):
        list(read_rows(tmp_path / "a.txt"))
