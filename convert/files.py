"""Atomic writes: files and folders are written under a temporary name, flushed to disk and renamed.

A failed write (a full disk, an exception in the caller, Ctrl-C) removes the temporary and leaves the earlier
contents. The renames come last and need no space.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from convert import strict_json
from convert.errors import ConvertError, unexpected
from convert.strict_json import JsonError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.partial", re.DOTALL)


@contextlib.contextmanager
def scratch_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder on the target's disk; it is removed when the block ends.

    Args:
        target: The final path; missing parents are created.

    Yields:
        The temporary folder; after a kill `remove_unfinished` removes it.

    Raises:
        OSError: It cannot be created.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / _temporary_name(target)
    try:
        temporary.mkdir()
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def atomic_folder(folder: str | os.PathLike[str], *, replaces: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder whose files get their final names together when the block succeeds.

    A new folder appears by one rename. In an existing folder other files stay, all new files are complete and flushed
    before the first rename, and files that match ``replaces`` and were not rewritten (shards of an earlier save) are
    removed.

    Args:
        folder: The final path; missing parents are created.
        replaces: Glob patterns of an earlier version's files.

    Yields:
        The temporary folder; subfolders only in a new folder.

    Raises:
        OSError: A write fails; for a full disk the message says so and names ``folder``.
    """
    folder = Path(folder)
    exists = folder.is_dir()
    if folder.exists() and not exists:
        raise NotADirectoryError(errno.ENOTDIR, "expected a folder, found a file", str(folder))
    with full_disk_names(folder), scratch_folder(folder / folder.name if exists else folder) as temporary:
        yield temporary
        files = sorted(temporary.iterdir())
        for path in sorted(temporary.rglob("*")):
            flush(path)
        flush(temporary)
        if exists:
            names = {file.name for file in files}
            for file in files:
                os.replace(file, folder / file.name)
            for pattern in replaces:
                for stale in folder.glob(pattern):
                    if stale.name not in names:
                        stale.unlink()
            flush(folder)
        else:
            os.rename(temporary, folder)
            flush(folder.parent)


@contextlib.contextmanager
def atomic_file(file: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a binary file that gets its final name when the block succeeds.

    Args:
        file: The final path; missing parents are created, an existing file (or a link's target) is replaced.

    Yields:
        The open temporary file.

    Raises:
        OSError: A write fails; for a full disk the message says so and names ``file``.
    """
    file = Path(file)
    if file.is_symlink():  # keep a link, as cp does
        file = file.resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.parent / _temporary_name(file)
    try:
        with full_disk_names(file):
            with open(temporary, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
            flush(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove the temporaries of killed processes.

    Args:
        folder: The parent of the final paths, or a final path itself; it may be missing. No other process may be
            writing there. Subfolders are skipped.
    """
    for left in Path(folder).glob(".*.partial"):
        if not _TEMPORARY.fullmatch(left.name):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def read_json(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        file: The file, UTF-8.

    Returns:
        The object; duplicate keys are an error.

    Raises:
        ConvertError: The file is missing or does not hold a JSON object.
    """
    try:
        raw = Path(file).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConvertError(f"{file}: no such file") from None
    return parse_json(raw, file, "contents")


def parse_json(raw: bytes, file: str | os.PathLike[str], field: str) -> dict[str, Any]:
    """Parse a JSON object; every failure is a ConvertError.

    Args:
        raw: UTF-8 JSON.
        file: Their file, for the message.
        field: Their place in the file, for the message.

    Returns:
        The object.

    Raises:
        ConvertError: Not UTF-8, not an object, or refused by `strict_json.parse`; with line and column.
    """
    try:
        value = strict_json.parse(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConvertError(
            f"{file}: {field}: expected a JSON object in UTF-8, got byte {error.start} of none"
        ) from None
    except JsonError as error:
        position = f"line {error.line}, column {error.column}"
        raise ConvertError(f"{file}: {field}: expected a JSON object: {error.problem} ({position})") from None
    if not isinstance(value, dict):
        raise unexpected(file, field, "a JSON object", value)
    return value


def _temporary_name(target: Path) -> str:
    return f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"


def flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def full_disk_names(target: Path) -> Iterator[None]:
    """Raise a full disk's error with the target's name and state.

    Args:
        target: The path being written.

    Raises:
        OSError: The block's own, naming the target if the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        message = f"{os.strerror(error.errno)} for writing this; nothing half-written was left, make room and run again"
        raise OSError(error.errno, message, str(target)) from error
