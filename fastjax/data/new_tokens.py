"""New tokens, as far as the tokenizer is concerned; `models.vocabulary` gives them their rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.errors import shorten, shown
from fastjax.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


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
    there = [text for text in texts if text in known and (rows is None or known[text] < rows)]
    if there:
        listed = shorten(", ".join(f"{shown(text, 60)} (id {known[text]})" for text in there), 500)
        raise ConfigError(f"new_tokens: expected tokens that the tokenizer does not know, got {listed}; leave them out")
    missing: Any = [token for token in wanted if token.content not in known]
    tokenizer.add_tokens(missing)
    known = tokenizer.get_vocab()
    return [known[text] for text in texts]


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The largest id plus one: the embedding rows that the tokenizer needs."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
