"""Rows of files: JSON lines, JSON, CSV and parquet, compressed or not, each row with where it stands.

JSON is read here rather than by a data-frame library because whatever is wrong with a row should be reported with its
file and line: the file is the user's and the line is where to look. A file is read as it is asked for, never whole,
except a JSON array.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from fastjax.errors import ConfigError, DataError

Row = tuple[Any, str]
"""A row, a mapping from column to value if all is well, and where it stands."""

_COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda path: gzip.open(path, "rb"),
    ".bz2": lambda path: bz2.open(path, "rb"),
    ".xz": lambda path: lzma.open(path, "rb"),
}


def read_rows(path: str | Path) -> Iterator[Row]:
    """Read the rows of a file, by its suffix.

    Args:
        path: A file that `is_readable`.

    Yields:
        Each row with its place: "file:line", or "file row n" (from 0) in parquet.

    Raises:
        OSError: The file cannot be read.
        DataError: Broken UTF-8, JSON, CSV, parquet or compression; file and line are named.
        ConfigError: A suffix that is none of the known.
    """
    path = Path(path)
    kind, opener = _kind(path)
    if kind not in _READERS:
        raise ConfigError(f"{path}: expected a file that ends in {SUFFIXES}, given {path.suffix or 'no suffix'}")
    if kind == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        with opener(path) as stream:
            yield from _READERS[kind](stream, path)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: broken {path.suffix} file: {error}") from error


def is_readable(path: str | Path) -> bool:
    """Whether `read_rows` knows the suffix of a path.

    Args:
        path: The path, which need not exist.
    """
    return _kind(Path(path))[0] in _READERS


def _kind(path: Path) -> tuple[str, Callable[[Path], Any]]:
    """The suffix that says what the file holds, and how to open it."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED and suffixes[-2:-1] != [".parquet"]:
        return (suffixes[-2] if len(suffixes) > 1 else ""), _COMPRESSED[suffixes[-1]]
    return (suffixes[-1] if suffixes else ""), lambda path: open(path, "rb")


def _read_json_lines(lines: IO[bytes], path: Path) -> Iterator[Row]:
    # Binary lines, so that a broken character is reported with its own line and not with a buffer's.
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            where = f"{path}:{number}"
            yield _parse_json(line, where), where


def _parse_json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{where}: JSON that is nested too deep") from error


def _read_json(stream: IO[bytes], path: Path) -> Iterator[Row]:
    """A JSON array of rows; without a bracket at its beginning, a file of JSON lines."""
    data = stream.read().removeprefix(b"\xef\xbb\xbf")
    if data.lstrip()[:1] != b"[":
        yield from _read_json_lines(io.BytesIO(data), path)
        return
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not valid UTF-8 at byte {error.start} of the file") from error
    decoder = json.JSONDecoder()
    end, line, counted = _skip(text, text.index("[") + 1), 1, 0
    while text[end : end + 1] != "]":
        line, counted = line + text.count("\n", counted, end), end
        where = f"{path}:{line}"
        try:
            row, end = decoder.raw_decode(text, end)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not valid JSON at column {error.colno}: {error.msg}") from error
        except RecursionError as error:
            raise DataError(f"{where}: JSON that is nested too deep") from error
        yield row, where
        end = _skip(text, end)
        if text[end : end + 1] == ",":
            end = _skip(text, end + 1)
        elif text[end : end + 1] != "]":
            line = text.count("\n", 0, end) + 1
            raise DataError(f"{path}:{line}: not valid JSON: expected ',' or ']' behind a row of the array")


def _skip(text: str, index: int) -> int:
    """The first place from `index` on that is not white space."""
    while text[index : index + 1] in (" ", "\n", "\r", "\t"):
        index += 1
    return index


def _read_csv(stream: IO[bytes], path: Path) -> Iterator[Row]:
    """Rows of strings; the first line names the columns. A field may go over several lines; the first one counts."""
    lines = _decoded(stream, path)
    reader = csv.reader(lines, strict=True)
    csv.field_size_limit(2**31 - 1)  # the module's own limit is shorter than many a document
    try:
        names = next(reader, [])
        first = reader.line_num + 1
        for fields in reader:
            where = f"{path}:{first}"
            first = reader.line_num + 1
            if not fields:
                continue
            if len(fields) != len(names):
                raise DataError(f"{where}: expected {len(names)} fields as in the first line, found {len(fields)}")
            yield dict(zip(names, fields, strict=True)), where
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error


def _decoded(stream: IO[bytes], path: Path) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        try:
            yield (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not valid UTF-8 at byte {error.start} of the line") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    yield without_nulls(row), f"{path} row {number}"
                    number += 1
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: broken parquet file: {error}") from error


def without_nulls(value: Any) -> Any:
    """A row of an Arrow table without the nulls that its schema brought in.

    Structures in a column have the same fields in all rows, so a message without `tool_calls` has it as null, and one
    function's parameters have every other function's as null.

    Args:
        value: The row, or a part of it.

    Returns:
        The same without fields that are null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


_READERS: dict[str, Callable[[IO[bytes], Path], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": lambda stream, path: _read_parquet(path),
}
SUFFIXES = ".jsonl, .ndjson, .json, .csv (each alone or with .gz, .bz2, .xz) or .parquet"
"""What `read_rows` reads, in words."""
