"""generation_config.json: the tokens at which a model's makers let its answers end."""

import os
from pathlib import Path

from convert.errors import unexpected
from convert.files import read_json

GENERATION_CONFIG = "generation_config.json"


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
    file = Path(folder) / GENERATION_CONFIG
    if not file.is_file():
        return ()
    given = read_json(file).get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise unexpected(file, "eos_token_id", "a token id or a list of them", given)
    return tuple(ids)
