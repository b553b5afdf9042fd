"""Data sets in files, folders and the `datasets` library to examples.

Readable files are read by `files`, so that every error names its line; a folder's files are assigned to splits as by
`datasets`. Every other path goes to `datasets.load_dataset`. Examples are read one by one, from any place, before or
during training.
"""

import dataclasses
import glob
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from convert.errors import shorten
from fastjax.data.columns import parse_row
from fastjax.data.files import SUFFIXES, Row, is_readable, read_rows, without_nulls
from fastjax.data.records import Record
from fastjax.data.settings import DataSource, check_columns
from fastjax.errors import ConfigError, DataError

_SLICED = re.compile(r"(?P<split>\w+)\[(?P<start>-?\d{1,12}%?)?:(?P<stop>-?\d{1,12}%?)?\]")


class OpenSource(NamedTuple):
    """A data set that exists.

    Attributes:
        source: The description.
        files: The files, in order; None: `datasets` reads it.
        dataset: The `datasets.Dataset`, or its `IterableDataset`; None: it has files.
    """

    source: DataSource
    files: tuple[Path, ...] | None
    dataset: Any = None

    def records(self, parse: Callable[..., Any] = parse_row, skip: int = 0, **how: Any) -> Iterator[Any]:
        """Read the examples.

        Args:
            parse: Makes an example of a row: `parse_row`, or `parse_preference`.
            skip: Examples to skip at the beginning.
            how: Further arguments of `parse`.

        Yields:
            The examples, in order.

        Raises:
            OSError: A file that cannot be read.
            DataError: A row that cannot be used.
        """
        for row, where in self.rows(skip):
            yield parse(row, where, self.source.columns, **how)

    def identity(self) -> str:
        """A fingerprint of the contents: of every byte of the files, or `datasets`' own.

        Raises:
            OSError: A file that cannot be read.
        """
        digest = hashlib.sha256(json.dumps([self.source.split, self.source.columns], sort_keys=True).encode())
        if self.files is None:
            digest.update(str(getattr(self.dataset, "_fingerprint", self.source)).encode())
        for file in self.files or ():
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
            digest.update("".join(file.suffixes).encode())
        return digest.hexdigest()

    def rows(self, skip: int = 0) -> Iterator[Row]:
        """Rows as they are, with their place in words, for `records`.

        Args:
            skip: rows to skip at the beginning.
        """
        if self.files is not None:
            rows = itertools.chain.from_iterable(map(read_rows, self.files))
            return itertools.islice(_sliced(rows, self.source.split), skip, None)
        given = isinstance(self.dataset, InMemoryRows)  # whose nulls a program wrote; Arrow's are those of a schema
        if given:
            rows = itertools.islice(self.dataset, skip, None)
        else:
            rows = self.dataset.skip(skip) if skip else self.dataset
        name = f"{self.source.path} row" if given else f"{self.source.path}[{self.source.split or 'train'}] row"
        numbered = enumerate(_iterate(rows, name), start=skip)
        return ((row if given else without_nulls(row), f"{name} {number}") for number, row in numbered)


Source = str | Path | DataSource | OpenSource | Iterable[Mapping[str, Any]]
"""A data set: a path, a description, one that is open, or one in memory (a `datasets.Dataset`, dicts of columns)."""

Sources = Source | Sequence[Source]
"""One or several data sets."""

_NAMED = (str, Path, DataSource, OpenSource)


class InMemoryRows:
    """Rows that a program has made, read as a `datasets.Dataset` is."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], name: str):
        """Read them.

        Args:
            rows: dicts of columns; an iterator is read to its end.
            name: of the data set, for errors.

        Raises:
            DataError: a row that is no dict.
        """
        self._rows = list(rows)
        for number, row in enumerate(self._rows):
            if not isinstance(row, Mapping):
                raise DataError(f"{name} row {number}: expected a dict of columns, got {shorten(repr(row), 80)}")
        told = json.dumps(self._rows, sort_keys=True, default=_in_words)
        self._fingerprint = hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _in_words(value: Any) -> Any:
    """A value that JSON has none for; of an array all of its numbers, which `repr` leaves out."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def given_rows(rows: Any, name: str, columns: dict[str, str] | None = None) -> OpenSource:
    """A data set that is in memory.

    Args:
        rows: a `datasets.Dataset`, or a `datasets.IterableDataset` or an iterable of dicts, which are read to their
            end.
        name: what it is called in errors.
        columns: as of `DataSource`.

    Raises:
        ConfigError: rows that are neither.
        DataError: a row that is no dict.
    """
    check_columns(columns, "columns")
    arrow = hasattr(rows, "column_names")
    if arrow and isinstance(rows, Mapping):
        splits = ", ".join(map(str, rows)) or "none"
        raise ConfigError(
            f"{name}: expected one data set, got a {type(rows).__name__} with the splits {shorten(splits)}; give "
            f"one of them, as data[{next(iter(rows), 'train')!r}]"
        )
    frame = hasattr(rows, "iloc")  # of pandas
    if frame or isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        way_out = "; give datasets.Dataset.from_pandas(…) of it" if frame else ""
        kind = type(rows).__name__
        raise ConfigError(f"{name}: expected a data set, an iterable of dicts or a path, got {kind}{way_out}")
    if not hasattr(rows, "_fingerprint"):
        rows = InMemoryRows(map(without_nulls, rows) if arrow else rows, name)
    return OpenSource(DataSource(name, columns=columns), None, rows)


def open_sources(
    sources: Sources, columns: dict[str, str] | None = None, *, streaming: bool = False
) -> list[OpenSource]:
    """Find data sets.

    Args:
        sources: The data sets; a list of dicts is one.
        columns: Names of the columns of data sets without their own.
        streaming: Let `datasets` stream them instead of fetching them first.

    Returns:
        One for each, in order.

    Raises:
        ConfigError: No data set, or a contradictory description.
        OSError: A missing file or data set.
        DataError: `datasets` cannot read it, or a row in memory that is no dict.
    """
    listed: list[Any] = [sources]
    if isinstance(sources, Sequence) and not isinstance(sources, _NAMED) and not _are_rows(sources):
        listed = list(sources)
    if not listed:
        raise ConfigError("expected at least one data set, got none")
    return [_open_one(item, f"data set {number}", columns, streaming) for number, item in enumerate(listed, start=1)]


def _are_rows(listed: Sequence[Any]) -> bool:
    return bool(listed) and isinstance(listed[0], Mapping) and not hasattr(listed[0], "column_names")


def _open_one(item: Any, name: str, columns: dict[str, str] | None, streaming: bool) -> OpenSource:
    if isinstance(item, OpenSource):
        return item
    if not isinstance(item, _NAMED):
        return given_rows(item, name, columns)
    source = item if isinstance(item, DataSource) else DataSource(str(item))
    columns = columns if source.columns is None else source.columns
    source = dataclasses.replace(source, streaming=streaming, columns=columns)
    if (opened := _find(source)) is not None:
        return opened
    path = _expanded(source)
    return _of_folder(source, path) if Path(path).is_dir() else OpenSource(source, None, _load(source, path))


def read_jsonl(paths: str | Path | Iterable[str | Path]) -> Iterator[Record]:
    """Read examples from files, one row at a time.

    Args:
        paths: One file or several, in order.

    Yields:
        The examples; see `parse_row`.

    Raises:
        OSError: A file that cannot be read.
        DataError: Broken UTF-8 or JSON, wrong columns, an unknown role; file and line are named.
    """
    for path in [paths] if isinstance(paths, str | Path) else paths:
        for row, where in read_rows(path):
            yield parse_row(row, where)


def check_sources(sources: Iterable[DataSource]) -> None:
    """Check that files exist and fit their descriptions; data sets of `datasets` are skipped.

    Args:
        sources: The data sets.

    Raises:
        ConfigError: A contradictory description.
        OSError: A missing file.
    """
    for source in sources:
        _find(source)


def _expanded(source: DataSource) -> str:
    return str(Path(source.path).expanduser()) if source.path.startswith("~") else source.path


def _find(source: DataSource) -> OpenSource | None:
    """A data set of files named by path or pattern; None: any other."""
    path = _expanded(source)
    if Path(path).is_file():
        if not is_readable(path):
            raise ConfigError(f"{shorten(path)}: expected a file that ends in {SUFFIXES}")
        return _of_files(source, [Path(path)])
    if Path(path).is_dir():
        return _of_files(source, _named(source.data_files, path)) if source.data_files else None
    if glob.has_magic(path):
        files = sorted(Path(name) for name in glob.glob(path, recursive=True) if is_readable(name))
        if not files:
            raise FileNotFoundError(2, f"no file that ends in {SUFFIXES} matches the pattern", path)
        return _of_files(source, files)
    if is_readable(path) or Path(path).is_absolute() or path.startswith("."):
        raise FileNotFoundError(2, "no such file or folder", path)
    return None


def _named(names: Sequence[str], folder: str) -> list[Path]:
    """The files of a folder that names or patterns inside it stand for."""
    files: list[Path] = []
    for name in names:
        found = sorted(Path(folder, path) for path in glob.glob(name, root_dir=folder, recursive=True))
        found = list(filter(is_readable, found))
        if not found:
            raise FileNotFoundError(2, f"no file that ends in {SUFFIXES} has this name", str(Path(folder, name)))
        files += found
    return files


def _of_files(source: DataSource, files: Sequence[Path]) -> OpenSource:
    split = source.split or "train"
    if split != "train" and not ((match := _SLICED.fullmatch(split)) and match["split"] == "train"):
        raise ConfigError(
            f"{shorten(source.path)}: split: expected train, or a part of it such as train[:10%], got "
            f"{shorten(split, 80)}"
        )
    if source.name is not None:
        raise ConfigError(f"{shorten(source.path)}: name: expected none for files, got {shorten(source.name)}")
    if source.data_files and not Path(_expanded(source)).is_dir():
        raise ConfigError(f"{shorten(source.path)}: data_files: expected null for a file, got {source.data_files}")
    return OpenSource(source, tuple(files))


def _of_folder(source: DataSource, folder: str) -> OpenSource:
    """A folder's files of the split, if `files` reads them all; else the data set of `datasets`."""
    import datasets

    split = source.split or "train"
    name = match["split"] if (match := _SLICED.fullmatch(split)) else split
    builder = _wrapped(source, lambda: datasets.load_dataset_builder(folder, source.name))
    files = [Path(str(file)) for file in (builder.config.data_files or {}).get(name, ())]
    if files and all(file.is_file() and is_readable(file) for file in files):
        return OpenSource(source, tuple(files))
    return OpenSource(source, None, _load(source, folder))


def _load(source: DataSource, path: str) -> Any:
    import datasets

    split = source.split or "train"
    how: dict[str, Any] = {"data_files": source.data_files, "split": split, "streaming": source.streaming}
    return _wrapped(source, lambda: datasets.load_dataset(path, source.name, **how))


def _wrapped(source: DataSource, load: Any) -> Any:
    try:
        return load()
    # It raises what the hub, its builders and Arrow raise: there is no common class.
    except Exception as error:
        message = " ".join(str(error.__cause__ or error).split())
        raise DataError(
            f"{shorten(source.path)}: datasets.load_dataset cannot read it: {shorten(message, 500)}"
        ) from error


def _iterate(rows: Iterable[Any], name: str) -> Iterator[Any]:
    try:
        yield from rows
    except Exception as error:  # of Arrow, of a codec, of the HTTP library
        raise DataError(f"{name}s cannot be read: {shorten(' '.join(str(error).split()))}") from error


def _sliced(rows: Iterator[Row], split: str | None) -> Iterator[Row]:
    """The part of the rows that a split such as train[10:-20%] names, rounded as `datasets` does."""
    match = _SLICED.fullmatch(split or "")
    if match is None:
        return rows
    start, stop = match["start"] or "0", match["stop"]
    if start.isdecimal() and (stop is None or stop.isdecimal()):
        return itertools.islice(rows, int(start), None if stop is None else int(stop))
    listed = list(rows)

    def index(bound: str) -> int:
        value = int(bound.rstrip("%"))
        return round(value * len(listed) / 100) if bound.endswith("%") else value

    return iter(listed[index(start) : None if stop is None else index(stop)])
