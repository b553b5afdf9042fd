"""generation_config.json: how a model's makers let it answer, and the tokens at which its answers end."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from convert.checkpoint import CONFIG
from convert.errors import unexpected
from convert.files import read_json

GENERATION_CONFIG = "generation_config.json"


def generation_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a folder's generation_config.json, by transformers' names.

    Args:
        folder: A model folder.

    Returns:
        The JSON object as it stands there; empty without the file.

    Raises:
        ConvertError: The file is not valid JSON.
        OSError: The file cannot be read.
    """
    file = Path(folder) / GENERATION_CONFIG
    return read_json(file) if file.is_file() else {}


def end_tokens(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """The ids that end an answer, such as Phi's `<|end|>` or gpt-oss' `<|call|>` beside the tokenizer's EOS.

    Args:
        folder: A model folder.

    Returns:
        The config's `eos_token_id`, a number or a list there; empty without the file or the key.

    Raises:
        ConvertError: The file is not valid JSON, or the value neither of these.
        OSError: The file cannot be read.
    """
    return _ends(Path(folder) / GENERATION_CONFIG)


def named_ends(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """The ids at which transformers and vLLM end an answer.

    Args:
        folder: A model folder. Without an end in its generation_config.json those of its config.json count.

    Raises:
        ConvertError: As of `end_tokens`.
        OSError: A file cannot be read.
    """
    return end_tokens(folder) or _ends(Path(folder) / CONFIG)


def missing_ends(folder: str | os.PathLike[str], ends: Iterable[int]) -> tuple[int, ...]:
    """Ends at which transformers and vLLM do not stop.

    Args:
        folder: A model folder.
        ends: Token ids.

    Returns:
        The given ids that the folder does not name, each once.

    Raises:
        ConvertError: As of `end_tokens`.
        OSError: A file cannot be read.
    """
    return tuple(dict.fromkeys(token for token in ends if token not in named_ends(folder)))


def add_ends(folder: Path, ends: Iterable[int], base: str | os.PathLike[str]) -> None:
    """Add ends to those of a base model.

    Args:
        folder: Gets a generation_config.json with the base's ends and these, and all else that one there says.
        ends: Token ids that the base does not name.
        base: A model folder, possibly the same.

    Raises:
        ConvertError: As of `end_tokens`.
        OSError: A file cannot be read or written.
    """
    config = generation_settings(folder)
    config["eos_token_id"] = [*named_ends(base), *ends]
    (folder / GENERATION_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _ends(file: Path) -> tuple[int, ...]:
    if not file.is_file():
        return ()
    given = read_json(file).get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise unexpected(file, "eos_token_id", "a token id or a list of them", given)
    return tuple(ids)
