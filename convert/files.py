"""Whole files or none: folders and files are written under a temporary name, flushed to disk and renamed.

A write that fails (a full disk, an exception in the caller, Ctrl-C) removes the temporary and leaves what stood
under the final name as it was. The renames come last and need no space.
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
    """Give a temporary folder on the disk of a final place; it is removed when the block ends.

    Args:
        target: The final place; missing parents are created.

    Yields:
        The temporary folder, which `remove_unfinished` removes if the process is killed.

    Raises:
        OSError: It cannot be made.
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
    """Give a temporary folder whose files get their final names together when the block ends without an error.

    A new folder appears by one rename. In a folder that exists, its other files stay, every new file is complete and
    flushed before the first rename, and files that ``replaces`` matches and that were not written again are removed
    (shards of an earlier save that would otherwise stand beside the new ones).

    Args:
        folder: The final place; missing parents are created.
        replaces: Glob patterns of file names that belong to an earlier version of the same contents.

    Yields:
        The temporary folder; subfolders in it only for a new folder.

    Raises:
        OSError: The files cannot be written; for a full disk the message says so and names ``folder``.
    """
    folder = Path(folder)
    exists = folder.is_dir()
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
    """Give a binary file that gets its final name when the block ends without an error.

    Args:
        file: The final place; missing parents are created, an earlier file is replaced, the one that a link leads to.

    Yields:
        The open temporary file.

    Raises:
        OSError: The file cannot be written; for a full disk the message says so and names ``file``.
    """
    file = Path(file)
    if file.is_symlink():  # it stays, as with cp
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
    """Remove the temporaries of processes that were killed while they wrote.

    Args:
        folder: Where the final places lie, or a folder that is a final place itself; it need not exist, and no other
            process may be writing there. Subfolders are not looked into.
    """
    for left in Path(folder).glob(".*.partial"):
        if not _TEMPORARY.fullmatch(left.name):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def read_json(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        file: The file, UTF-8.

    Returns:
        The object; a key that stands twice is an error, not the last one.

    Raises:
        ConvertError: The file is missing or does not hold a JSON object.
    """
    try:
        raw = Path(file).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConvertError(f"{file}: no such file") from None
    return parse_json(raw, file, "contents")


def parse_json(raw: bytes, file: str | os.PathLike[str], field: str) -> dict[str, Any]:
    """Parse bytes that should be a JSON object, with every way to fail as one ConvertError.

    Args:
        raw: UTF-8 JSON.
        file: The file they come from, for the message.
        field: Where in the file, for the message.

    Returns:
        The object.

    Raises:
        ConvertError: Not UTF-8, not an object, or what `strict_json.parse` refuses; with line and column.
    """
    try:
        value = strict_json.parse(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConvertError(
            f"{file}: {field}: expected a JSON object in UTF-8, got byte {error.start} of none"
        ) from None
    except JsonError as error:
        place = f"line {error.line}, column {error.column}"
        raise ConvertError(f"{file}: {field}: expected a JSON object: {error.problem} ({place})") from None
    if not isinstance(value, dict):
        raise unexpected(file, field, "a JSON object", value)
    return value


def _temporary_name(target: Path) -> str:
    return f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"


def flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def full_disk_names(target: Path) -> Iterator[None]:
    """Turn a full disk's bare error into one that names the target and what became of it.

    Args:
        target: What is being written.

    Raises:
        OSError: The block's own, with the name if there was no room.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        message = f"{os.strerror(error.errno)} for writing this; nothing half-written was left, make room and run again"
        raise OSError(error.errno, message, str(target)) from error
