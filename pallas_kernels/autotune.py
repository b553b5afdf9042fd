"""Block sizes that were measured: kept on disk by who measures them, shipped in tables for known cards.

A kernel lists the block sizes that it may run with, its own guess first. What runs is, in this order: what was
measured on this machine (`keep`), what the kernel's shipped table says for this card, the guess. Nothing is measured
unless it is asked for (`fastjax bench attention --autotune`).

What was measured on this machine counts for the device, the version of JAX and the very source of the kernel; a
shipped table goes with the source that it lies beside. Both are JSON of one form, `Table`. A file that cannot be read,
is no such table or names block sizes that the kernel does not list is warned of and passed over: it never stops a run.
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
    """A kernel whose block sizes can be measured.

    Attributes:
        name: unique, for example "attention.mosaic.forward".
        sources: folders and files that decide how fast it runs; another content means other block sizes.
        shipped: its shipped table.
    """

    name: str
    sources: tuple[Path, ...]
    shipped: Path


class Table(NamedTuple):
    """Block sizes by what they are for.

    Attributes:
        entries: what they are for → the fields of the config.
        made: card → when and how its entries were measured.
    """

    entries: Mapping[str, Mapping[str, Any]]
    made: Mapping[str, str]


def cache_file() -> Path:
    """Where this machine's block sizes are kept: under FASTJAX_CACHE, else in fastjax's folder of the user's caches."""
    given = os.environ.get("FASTJAX_CACHE")
    if given:
        return Path(given).expanduser() / "autotune.json"
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "fastjax" / "autotune.json"


def best(kernel: Kernel, facts: str, candidates: Sequence[Config]) -> Config:
    """The block sizes to run with on `dispatch.target()`.

    Args:
        kernel: which.
        facts: what the block sizes depend on beside the card: dtype, sizes, options.
        candidates: frozen dataclasses of numbers that the kernel can run with, its guess first.

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
    """Keep block sizes that were measured on this machine, beside those that are there.

    Args:
        kernel: which.
        facts: as for `best`.
        config: the fastest.

    Returns:
        The file.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it is something else than a table of block sizes.
    """
    path = cache_file()
    key = _measured_key(kernel, dispatch.target().device_kind, facts)
    table = read(path) if path.exists() else Table({}, {})
    write(path, Table({**table.entries, key: dataclasses.asdict(config)}, table.made))
    return path


def ship(path: Path, found: Mapping[tuple[Kernel, str], Any], made: str) -> None:
    """Write a table to be shipped: the kernels' present one with this card's new block sizes in it.

    Args:
        path: the file to write.
        found: (kernel, facts) → the fastest; kernels of one shipped table.
        made: when and how they were measured; it is added to what the table says of this card.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the present table is something else.
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
        raise ValueError(f"{path}: expected a table of block sizes, given what is no JSON ({error})") from error
    entries, made = (content.get(name) if isinstance(content, dict) else None for name in ("entries", "made"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f'{path}: expected a table of block sizes with "format": "{_FORMAT}", given something else')
    if not isinstance(entries, dict) or not isinstance(made, dict):
        raise ValueError(f'{path}: expected objects "entries" and "made", given {type(entries)} and {type(made)}')
    return Table(entries, made)


def write(path: Path, table: Table) -> None:
    """Write a table, all or nothing, an entry a line, so that a difference can be read.

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
    """The table of a file, an empty one where there is none or none that can be read."""
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
