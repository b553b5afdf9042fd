"""Loading a tokenizer from a folder, without torch and without a hub, and its new tokens.

transformers' generic class reads tokenizer.json as it is. Its AutoTokenizer would choose a class by the model's type,
and import torch on the way wherever torch is installed. `models.vocabulary` gives new tokens their rows.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.errors import shorten, shown
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""The files of a tokenizer, of which a folder has one; the second needs the package sentencepiece or tiktoken."""


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a model folder.

    Args:
        folder: A local folder in Hugging Face format.

    Returns:
        The tokenizer, with the chat template of the folder if it has one, whose batches need no PyTorch
        (`token_batches`). `backend_tokenizer` is the Rust object.

    Raises:
        ConfigError: A missing folder, or a missing or broken tokenizer.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"no tokenizer at {folder}: there is no such folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"no tokenizer in {folder}: expected {' or '.join(TOKENIZER_FILES)} there")
    tokenizer_class = _import_tokenizer_class()
    try:
        return tokenizer_class.from_pretrained(str(folder), local_files_only=True)
    # The readers behind it raise whatever they meet in a broken file, plain Exception included.
    except Exception as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def check_post_processor(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Refuse a tokenizer whose post-processor has no ids for a token that it adds; encoding with it ends in a panic.

    Args:
        tokenizer: A tokenizer with a Rust backend.

    Raises:
        ConfigError: The tokens, by name.
    """
    processor = tokenizer.backend_tokenizer.post_processor
    state: dict[str, Any] = {} if processor is None else json.loads(processor.__getstate__())
    lacking = {
        piece["SpecialToken"]["id"]: None
        for one in state.get("processors", [state])
        for piece in (*one.get("single", ()), *one.get("pair", ()))
        if piece.get("SpecialToken", {}).get("id") not in {None, *one["special_tokens"]}
    }
    if lacking:
        raise ConfigError(
            f"the tokenizer in {tokenizer.name_or_path}: post_processor: expected ids in its special_tokens for each "
            f"token that it adds, got none for {shorten(', '.join(lacking))}; name them there, or leave the tokens out "
            "(tokenizer.json)"
        )


def own_tokenizer(adapter: str | Path) -> "PreTrainedTokenizerFast | None":
    """The tokenizer in an adapter's folder, with the chat template that it was trained with; None where it has none.

    Args:
        adapter: a PEFT folder.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if any((Path(adapter) / name).is_file() for name in TOKENIZER_FILES):
        return load_tokenizer(adapter)
    return None


def add_tokens(
    tokenizer: "PreTrainedTokenizerBase", tokens: "Sequence[str | AddedToken]", rows: int | None = None
) -> list[int]:
    """Add tokens to a tokenizer.

    A text is matched literally and becomes an ordinary token, which decoding shows even where special tokens are
    skipped; for another behaviour pass a `tokenizers.AddedToken`, for instance with `special=True`.

    Args:
        tokenizer: changed in place.
        tokens: the new tokens.
        rows: of the embedding; a known token without a row in it counts as new.

    Returns:
        Their ids.

    Raises:
        ConfigError: empty, repeated or known tokens.
    """
    from tokenizers import AddedToken

    wanted = [token if isinstance(token, AddedToken) else AddedToken(token, normalized=False) for token in tokens]
    texts = [token.content for token in wanted]
    if isinstance(tokens, str) or not all(texts) or len(set(texts)) < len(texts):
        raise ConfigError(f"new_tokens: expected different texts that are not empty, got {shown(tokens)}")
    known = tokenizer.get_vocab()
    taken = [text for text in texts if text in known and (rows is None or known[text] < rows)]
    if taken:
        listed = shorten(", ".join(f"{shown(text, 60)} (id {known[text]})" for text in taken), 500)
        raise ConfigError(f"new_tokens: expected tokens that the tokenizer does not know, got {listed}; leave them out")
    missing: Any = [token for token in wanted if token.content not in known]
    tokenizer.add_tokens(missing)
    known = tokenizer.get_vocab()
    return [known[text] for text in texts]


def set_special_tokens(tokenizer: "PreTrainedTokenizerBase", tokens: Mapping[Any, str]) -> None:
    """Give a tokenizer's special tokens their roles.

    Args:
        tokenizer: changed in place.
        tokens: role, such as eos_token → its token.

    Raises:
        ConfigError: a token that the tokenizer lacks.
    """
    known = tokenizer.get_vocab()
    if lacking := [f"{role}: {shown(token, 60)}" for role, token in tokens.items() if token not in known]:
        raise ConfigError(
            f"special_tokens_map: expected tokens that the tokenizer has, got {', '.join(lacking)}; add them "
            "(new_tokens)"
        )
    if tokens:
        tokenizer.add_special_tokens(dict(tokens))


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The largest id plus one: the embedding rows that the tokenizer needs."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _import_tokenizer_class() -> "type[PreTrainedTokenizerFast]":
    """Import transformers without its advice to install torch."""

    def keep(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(keep)
    try:
        from fastjax.data.token_batches import PreTrainedTokenizerFast
    finally:
        logger.removeFilter(keep)
    return PreTrainedTokenizerFast
