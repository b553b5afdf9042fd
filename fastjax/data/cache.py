"""Prepared data kept for the next run.

An entry is a folder, named by a fingerprint of everything that shapes the rows: the bytes of the files, the tokenizer
as it is serialised, the template, every option, and the version of this format. It appears whole or not at all. When
it is read, its arrays are mapped into memory, not loaded, and compared with the checksum that was stored with them;
an entry that is damaged is made again. Deleting entries is always safe.

What cannot be cached (a full disk, a folder that cannot be written) is not a reason to stop a run: it is said, and the
run goes on.
"""

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convert import strict_json
from convert.files import atomic_folder
from fastjax.data.documents import Counts, Documents
from fastjax.data.origins import Origins
from fastjax.data.packing import PackedRows

FORMAT = 2
"""To be raised when the same input comes to give other rows, or is stored in another way."""

_META = "meta.json"


def arrays_of(rows: PackedRows) -> dict[str, np.ndarray]:
    """All arrays behind rows.

    Args:
        rows: The rows.

    Returns:
        Name → array; those that say where the examples came from begin with `origins.`.
    """
    documents, origins = rows.documents, rows.origins
    arrays = {
        "documents.tokens": documents.tokens,
        "documents.targets": documents.targets,
        "documents.offsets": documents.offsets,
        "documents.examples": documents.examples,
        "rows.order": rows.order,
        "rows.offsets": rows.offsets,
    }
    return arrays | ({} if origins is None else {"origins.place": origins.place, "origins.number": origins.number})


def fingerprint(rows: PackedRows) -> str:
    """A checksum of rows: of what is trained on, not of where it came from.

    Args:
        rows: The rows.

    Returns:
        Hexadecimal digits, equal exactly when tokens, targets and their division into rows are.
    """
    digest = hashlib.sha256(str(rows.row_length).encode())
    for name, array in arrays_of(rows).items():
        if not name.startswith("origins."):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()


def load(folder: Path) -> tuple[PackedRows, dict[str, Any]] | None:
    """Read an entry.

    Args:
        folder: Where it would be.

    Returns:
        The rows, mapped into memory, and what was stored with them; None when there is no entry, or a damaged one.
    """
    try:
        meta = strict_json.parse((folder / _META).read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in meta["arrays"]}
        parts = {name: arrays[f"documents.{name}"] for name in ("tokens", "targets", "offsets", "examples")}
        documents = Documents(**parts, counts=Counts(*meta["counts"]))
        origins = Origins(tuple(meta["places"]), arrays["origins.place"], arrays["origins.number"])
        rows = PackedRows(documents, arrays["rows.order"], arrays["rows.offsets"], meta["row_length"], origins)
        return (rows, meta["extra"]) if fingerprint(rows) == meta["fingerprint"] else None
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def store(folder: Path, rows: PackedRows, extra: dict[str, Any], say: Callable[[str], None] | None = None) -> None:
    """Write an entry; what prevents it is said and no error.

    Args:
        folder: Where it is to be; a damaged entry there is replaced.
        rows: The rows, with their origins.
        extra: What to store with them, as JSON.
        say: Takes a message; None: it is a warning.
    """
    assert rows.origins is not None
    arrays = arrays_of(rows)
    meta = {
        "arrays": list(arrays),
        "counts": rows.documents.counts,
        "places": rows.origins.places,
        "row_length": rows.row_length,
        "fingerprint": fingerprint(rows),
        "extra": extra,
    }
    try:
        with atomic_folder(folder) as temporary:
            for name, array in arrays.items():
                np.save(temporary / f"{name}.npy", array, allow_pickle=False)
            (temporary / _META).write_text(json.dumps(meta), encoding="utf-8")
    except OSError as error:
        if load(folder) is not None:  # another process was faster
            return
        message = f"the prepared data are not kept for the next run: {error.strerror or error} ({folder})"
        say(message) if say is not None else warnings.warn(message, stacklevel=2)
