"""The cache of prepared data.

An entry is a folder, named by a fingerprint of everything that shapes the rows: the bytes of the files, the serialised
tokenizer, the template, every option, and the version of this format. It appears whole or not at all. Reading maps its
arrays into memory and compares them with the stored checksum; a damaged entry is made again. Deleting entries is always
safe.

A failure to write (a full disk, a read-only folder) is reported and does not stop the run.
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
from fastjax.data.packing import Origins, PackedRows

FORMAT = 4
"""The version; raise it when equal input gives other rows or another layout of the entry."""

_META = "meta.json"


def arrays_of(rows: PackedRows) -> dict[str, np.ndarray]:
    """The arrays behind rows, by name.

    Args:
        rows: The rows.

    Returns:
        Name → array; the names of the origins' arrays begin with `origins.`, of the documents' fields with `fields.`.
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
    arrays |= {f"fields.{name}": field for name, field in rows.fields.items()}
    return arrays | ({} if origins is None else {"origins.place": origins.place, "origins.number": origins.number})


def fingerprint(rows: PackedRows) -> str:
    """A checksum of the rows' content, not of their origins.

    Args:
        rows: The rows.

    Returns:
        Hexadecimal digits; equal for equal tokens, targets and division into rows.
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
        folder: The entry's.

    Returns:
        The rows, mapped into memory, and the `extra` of `store`; None: no entry, or a damaged one.
    """
    try:
        meta = strict_json.parse((folder / _META).read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in meta["arrays"]}
        parts = {name: arrays[f"documents.{name}"] for name in ("tokens", "targets", "offsets", "examples")}
        documents = Documents(**parts, counts=Counts(*meta["counts"]))
        origins = Origins(tuple(meta["places"]), arrays["origins.place"], arrays["origins.number"])
        fields = {name.removeprefix("fields."): array for name, array in arrays.items() if name.startswith("fields.")}
        order, offsets = arrays["rows.order"], arrays["rows.offsets"]
        rows = PackedRows(documents, order, offsets, meta["row_length"], origins, fields)
        return (rows, meta["extra"]) if fingerprint(rows) == meta["fingerprint"] else None
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def store(folder: Path, rows: PackedRows, extra: dict[str, Any], say: Callable[[str], None] | None = None) -> None:
    """Write an entry; a failure is a message and no error.

    Args:
        folder: The entry's; a damaged entry is replaced.
        rows: The rows, with their origins.
        extra: JSON stored beside them.
        say: Takes the message; None: a warning.
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
