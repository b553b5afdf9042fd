"""Rows of files: JSON lines, JSON, CSV and parquet, compressed or not, each row with its file and line.

JSON is parsed here and not by a data-frame library so that every error names the file and line. Files are read
incrementally, except a JSON array.
"""

import bz2
import csv
import gzip
import io
import itertools
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from convert import strict_json
from convert.errors import shorten
from convert.strict_json import JsonError, skip_space
from fastjax.errors import ConfigError, DataError
from fastjax.limits import MAX_LINE_BYTES

Row = tuple[Any, str]
"""A row, a mapping from column to value if it is valid, and its place."""

_COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda path: gzip.open(path, "rb"),
    ".bz2": lambda path: bz2.open(path, "rb"),
    ".xz": lambda path: lzma.open(path, "rb"),
}


def read_rows(path: str | Path) -> Iterator[Row]:
    """Read the rows of a file in the format of its suffix.

    Args:
        path: A file that `is_readable`.

    Yields:
        Each row with its place: "file:line", or "file row n" (from 0) in parquet.

    Raises:
        OSError: The file cannot be read.
        DataError: Broken UTF-8, JSON, CSV, parquet or compression; file and line are named.
        ConfigError: An unknown suffix.
    """
    path = Path(path)
    kind, opener = _kind(path)
    if kind not in _READERS:
        raise ConfigError(f"{path}: expected a file that ends in {SUFFIXES}, got {path.suffix or 'no suffix'}")
    if kind == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        with opener(path) as stream:
            yield from _READERS[kind](stream, path)
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
        raise DataError(f"{path}: broken {path.suffix} file: {error}") from error


def is_readable(path: str | Path) -> bool:
    """Whether `read_rows` knows the suffix of a path.

    Args:
        path: The path, which need not exist.
    """
    return _kind(Path(path))[0] in _READERS


def _kind(path: Path) -> tuple[str, Callable[[Path], Any]]:
    """The suffix of the format, and the function that opens the file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED and suffixes[-2:-1] != [".parquet"]:
        return (suffixes[-2] if len(suffixes) > 1 else ""), _COMPRESSED[suffixes[-1]]
    return (suffixes[-1] if suffixes else ""), lambda path: open(path, "rb")


def _read_json_lines(lines: IO[bytes], path: Path) -> Iterator[Row]:
    # Binary lines, so that a broken character is reported with its own line and not with a buffer's.
    for number, line in _numbered(lines, path):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            where = f"{path}:{number}"
            yield _parse_json(line, where), where


def _numbered(stream: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers; one over `MAX_LINE_BYTES`, as in a hostile compressed file, is an error."""
    for number in itertools.count(1):
        line = stream.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES} bytes")
        yield number, line


def _parse_json(line: bytes, where: str) -> Any:
    try:
        return strict_json.parse(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start} of the line") from error
    except JsonError as error:
        raise DataError(f"{where}: not valid JSON at column {error.column}: {error.problem}") from error


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
    end, line, counted = skip_space(text, text.index("[") + 1), 1, 0
    closed = text[end : end + 1] == "]"
    while not closed:
        line, counted = line + text.count("\n", counted, end), end
        try:
            row, end = strict_json.decode(text, end)
        except JsonError as error:
            raise DataError(f"{path}:{error.line}: not valid JSON at column {error.column}: {error.problem}") from error
        yield row, f"{path}:{line}"
        end = skip_space(text, end)
        closed = text[end : end + 1] == "]"
        if not closed and text[end : end + 1] != ",":
            raise _broken_array(path, text, end, "expected ',' or ']' behind a row of the array")
        end = skip_space(text, end if closed else end + 1)
        if not closed and text[end : end + 1] == "]":
            raise _broken_array(path, text, end, "expected a row behind ','")
    end = skip_space(text, end + 1)
    if end < len(text):
        raise _broken_array(path, text, end, "something stands behind the array")


def _broken_array(path: Path, text: str, place: int, problem: str) -> DataError:
    line = text.count("\n", 0, place) + 1
    return DataError(f"{path}:{line}: not valid JSON: {problem}")


def _read_csv(stream: IO[bytes], path: Path) -> Iterator[Row]:
    """Rows of strings; the first line names the columns. A row's place is its first line."""
    lines = _decoded(stream, path)
    reader = csv.reader(lines, strict=True)
    csv.field_size_limit(MAX_LINE_BYTES)  # the module's own limit is shorter than many a document
    try:
        names = next(reader, [])
        _check_columns(names, f"{path}:1")
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


def _check_columns(names: Sequence[str], where: str) -> None:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        listed = shorten(", ".join(map(repr, twice)))
        raise DataError(f"{where}: the same column twice: {listed}; give each a name of its own")


def _decoded(stream: IO[bytes], path: Path) -> Iterator[str]:
    for number, line in _numbered(stream, path):
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
            _check_columns(file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    yield without_nulls(row), f"{path} row {number}"
                    number += 1
    # Of Arrow and its codecs, as OSError without a number; of values that Python has none for, as ValueError.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise DataError(f"{path}: broken parquet file: {shorten(' '.join(str(error).split()))}") from error


def without_nulls(value: Any) -> Any:
    """A row of an Arrow table without the nulls of its schema.

    Structures in a column have the same fields in all rows, so a message without `tool_calls` has it as null, and one
    function's parameters have every other function's as null.

    Args:
        value: The row, or a part of it.

    Returns:
        The same without null fields.
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
"""The suffixes of `read_rows`, in words."""
