"""Measured block sizes: this machine's in the user's cache, those of known cards in shipped tables.

A kernel lists its possible block sizes, its own guess first. It runs with, in this order: those measured on this
machine (`keep`), those of its shipped table for this card, the guess. Nothing is measured unless asked for (`fastjax
bench attention --autotune`).

Measurements on this machine hold for the device, the version of JAX and the kernel's source; a shipped table goes with
the source beside it. Both are JSON of one form, `Table`. A file that cannot be read, is no such table or names block
sizes outside the kernel's list causes a warning and is passed over: it never stops a run.
"""

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from pallas_kernels import dispatch

_FORMAT = "fastjax block sizes 1"

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel with measurable block sizes.

    Attributes:
        name: unique, for example "attention.mosaic.forward".
        sources: folders and files of its code; measurements hold for their content.
        shipped: its shipped table.
    """

    name: str
    sources: tuple[Path, ...]
    shipped: Path


class Table(NamedTuple):
    """Block sizes by kernel and case.

    Attributes:
        entries: kernel and case → the fields of the config.
        made: card → when and how its entries were measured.
    """

    entries: Mapping[str, Mapping[str, Any]]
    made: Mapping[str, str]


def cache_folder() -> Path:
    """The folder of fastjax in the user's XDG cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastjax"


def cache_file() -> Path:
    """The file of this machine's block sizes."""
    return cache_folder() / "autotune.json"


def best(kernel: Kernel, facts: str, candidates: Sequence[Config]) -> Config:
    """The block sizes to run with on `dispatch.target()`.

    Args:
        kernel: the kernel.
        facts: the case, beside the card: dtype, sizes, options.
        candidates: frozen dataclasses of numbers, the kernel's guess first.

    Returns:
        The measured one of the candidates, or the guess.
    """
    device = dispatch.target().device_kind
    for path, key in (
        (cache_file(), _measured_key(kernel, device, facts)),
        (kernel.shipped, _key(kernel, device, facts)),
    ):
        fields = _readable(path).entries.get(key)
        if fields is None:
            continue
        for candidate in candidates:
            if dataclasses.asdict(candidate) == fields:  # pyright: ignore[reportArgumentType]
                return candidate
        warnings.warn(
            f"{path}: passed over {fields!r} for {key!r}: not among the {len(candidates)} block sizes that the kernel "
            "may run with; measure again with `fastjax bench … --autotune`, or remove the entry",
            stacklevel=2,
        )
    return candidates[0]


def keep(kernel: Kernel, facts: str, config: Any) -> Path:
    """Add block sizes measured on this machine to its file.

    Args:
        kernel: the kernel.
        facts: as for `best`.
        config: the fastest.

    Returns:
        The file.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it is no table of block sizes.
    """
    path = cache_file()
    key = _measured_key(kernel, dispatch.target().device_kind, facts)
    table = read(path) if path.exists() else Table({}, {})
    write(path, Table({**table.entries, key: dataclasses.asdict(config)}, table.made))
    return path


def ship(path: Path, found: Mapping[tuple[Kernel, str], Any], made: str) -> None:
    """Write a table to ship: the kernels' present one with this card's new block sizes.

    Args:
        path: the file to write.
        found: (kernel, facts) → the fastest; kernels of one shipped table.
        made: when and how they were measured; appended to the table's text for this card.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the present file is no table of block sizes.
    """
    device = dispatch.target().device_kind
    (present,) = {kernel.shipped for kernel, _ in found}
    table = read(present) if present.exists() else Table({}, {})
    new = {_key(kernel, device, facts): dataclasses.asdict(config) for (kernel, facts), config in found.items()}
    before = table.made.get(device, "")
    made = before if made in before else "; ".join(filter(None, (before, made)))
    write(path, Table({**table.entries, **new}, {**table.made, device: made}))


def read(path: Path) -> Table:
    """Read a table.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no table of block sizes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a table of block sizes in JSON, got {error}") from error
    entries, made = (content.get(name) if isinstance(content, dict) else None for name in ("entries", "made"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f'{path}: expected a table of block sizes with "format": "{_FORMAT}", got another file')
    if not isinstance(entries, dict) or not isinstance(made, dict):
        raise ValueError(f'{path}: expected objects "entries" and "made", got {type(entries)} and {type(made)}')
    return Table(entries, made)


def write(path: Path, table: Table) -> None:
    """Write a table atomically, an entry a line for readable diffs.

    Raises:
        OSError: the file cannot be written.
    """
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(table.entries[key])}" for key in sorted(table.entries))
    made = json.dumps(dict(sorted(table.made.items())), indent=1)
    text = f'{{"format": "{_FORMAT}",\n"made": {made},\n"entries": {{\n{lines}\n}}}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _readable(path: Path) -> Table:
    """The table of a file; an empty one if it is missing or unreadable."""
    try:
        state = path.stat()
    except OSError:
        return Table({}, {})
    return _read_once(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=8)
def _read_once(path: Path, modified: int, size: int) -> Table:
    del modified, size
    try:
        return read(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"passed over measured block sizes, kernels run with their own guess: {error}", stacklevel=3)
        return Table({}, {})


def _key(kernel: Kernel, device: str, facts: str) -> str:
    return f"{device} | {kernel.name} | {facts}"


def _measured_key(kernel: Kernel, device: str, facts: str) -> str:
    return f"{_key(kernel, device, facts)} | jax {jax.__version__} | source {_source(kernel.sources)}"


@functools.cache
def _source(paths: tuple[Path, ...]) -> str:
    """A hash of Python files."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("*.py")))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
