"""Fingerprints of a conversion's inputs; an interrupted conversion resumes only if they still match."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from convert.errors import ConvertError

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


def fingerprint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Fingerprint a folder's files: small ones by contents, large ones by size and modification time.

    Args:
        folder: A model or adapter folder; subfolders are skipped.

    Returns:
        A JSON object.
    """
    files: dict[str, Any] = {}
    for file in sorted(Path(folder).iterdir()):
        if file.is_file():
            status = file.stat()
            small = status.st_size < 2**20
            files[file.name] = (
                hashlib.sha256(file.read_bytes()).hexdigest() if small else [status.st_size, status.st_mtime_ns]
            )
    return {"folder": str(Path(folder).absolute()), "files": files}


def count_tokens(folder: Path) -> int | None:
    """One more than the largest token id in a folder's tokenizer.json; None without a readable one.

    Args:
        folder: A model or adapter folder.
    """
    try:
        raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = raw["model"]["vocab"]
        ids = [*vocab.values()] if isinstance(vocab, dict) else range(len(vocab))
        return 1 + max([-1, *ids, *(token["id"] for token in raw.get("added_tokens") or ())])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def check_apart(target: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> None:
    """Refuse to write into a source folder, or into one that contains a source.

    Args:
        target: The folder to write.
        sources: The folders to read.

    Raises:
        ConvertError: They overlap.
    """
    resolved = Path(target).resolve()
    for source in sources:
        if resolved == Path(source).resolve() or resolved in Path(source).resolve().parents:
            raise ConvertError(f"{target}: expected another folder than the one that is read, {source}, or above it")
