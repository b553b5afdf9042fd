"""Special tokens in the content of rows, and their reading as text.

A tokenizer matches its special tokens anywhere: a user who writes `<|im_end|>` ends the turn. Reading them as text
takes a second tokenizer, equal but for the names of its special tokens, which are made of Unicode's noncharacters and
occur in no text. Before a conversation is rendered, special tokens in its content are hidden behind other such names;
those left in the rendered text are the template's. These become the second tokenizer's names, and the hidden ones text
again. A name is as long as its text, so that offsets stay.
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from fastjax.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# Names begin in one of eight ways and go on with hexadecimal digits, so that adjacent ones can be told apart.
_CONTROL, _HIDDEN, _DIGITS = (
    "".join(map(chr, codes)) for codes in (range(0xFDD0, 0xFDD8), range(0xFDD8, 0xFDE0), range(0xFDE0, 0xFDF0))
)
_RESERVED = re.compile("[\ufdd0-\ufdef]")


class SpecialTexts:
    """The texts of a tokenizer's special tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        """Read a tokenizer.

        Args:
            tokenizer: The tokenizer.
        """
        self.ids = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.pattern = any_of(self.ids)

    def within(self, value: Any) -> bool:
        """Whether a text, or any text in a JSON value, holds special tokens.

        Args:
            value: The text or value.
        """
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                if self.pattern.search(item) is not None:
                    return True
            elif isinstance(item, dict):
                stack += item
                stack += item.values()
            elif isinstance(item, list):
                stack += item
        return False


class ContentAsText:
    """A tokenizer that reads the template's special tokens as control tokens, and the content's as text.

    Attributes:
        backend: The tokenizer, for texts from `shown`, or without control tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", texts: SpecialTexts):
        """Build it.

        Args:
            tokenizer: The tokenizer; unchanged.
            texts: The texts of its special tokens.

        Raises:
            ConfigError: The tokenizer cannot read a special token's text as text.
        """
        control, hidden = _names(texts.ids, _CONTROL), _names(texts.ids, _HIDDEN)
        self.backend = _renamed(tokenizer, control)
        self._check(texts, control, tokenizer.name_or_path)
        self._hide = texts.pattern, hidden
        back = {name: text for text, name in hidden.items()}
        self._show = any_of(control | back), control | back

    def hidden(self, value: Any, where: str) -> Any:
        """Content for the template, with its special tokens hidden.

        Args:
            value: A text, or messages or tools.
            where: File and line, for errors.

        Returns:
            The content, possibly `value` itself.

        Raises:
            DataError: Reserved characters, or a value nested too deep.
        """
        try:
            return self._hidden(value, where)
        except RecursionError:
            raise DataError(f"{where}: what it says is nested too deep") from None

    def shown(self, text: str) -> str:
        """A rendered text for `backend`, with unchanged offsets.

        Args:
            text: The template's output.
        """
        return _replaced(text, *self._show)

    def _hidden(self, value: Any, where: str) -> Any:
        if isinstance(value, str):
            self.check(value, where)
            return _replaced(value, *self._hide)
        if isinstance(value, dict):
            return {self._hidden(key, where): self._hidden(item, where) for key, item in value.items()}
        return [self._hidden(item, where) for item in value] if isinstance(value, list) else value

    def check(self, text: str, where: str) -> None:
        """Raise DataError for a reserved character.

        Args:
            text: The content of a row.
            where: File and line, for the error.

        Raises:
            DataError: The text holds one.
        """
        reserved = _RESERVED.search(text)
        if reserved is not None:
            raise DataError(
                f"{where}: the character U+{ord(reserved[0]):04X}, which Unicode keeps for programs' own use, cannot "
                "be read with special_tokens: text; remove it"
            )

    def _check(self, texts: SpecialTexts, control: dict[str, str], folder: str) -> None:
        for text, index in texts.ids.items():
            named, plain = (self.backend.encode(form, add_special_tokens=False).ids for form in (control[text], text))
            if named != [index] or index in plain:
                raise ConfigError(
                    f"data.special_tokens: text: the tokenizer in {folder} cannot read {text} as text; leave the "
                    "setting at control"
                )


def any_of(texts: Any) -> re.Pattern[str]:
    """Matches the longest of some texts."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _replaced(text: str, pattern: re.Pattern[str], by: dict[str, str]) -> str:
    return pattern.sub(lambda found: by[found[0]], text)


def _names(texts: dict[str, int], beginnings: str) -> dict[str, str]:
    """A name for each text, of the same length."""
    names: dict[str, str] = {}
    unused: dict[int, Iterator[tuple[str, ...]]] = {}
    for text in texts:
        length = len(text)
        characters = unused.setdefault(length, itertools.product(beginnings, *[_DIGITS] * (length - 1)))
        names[text] = "".join(next(characters, ()))
        if not names[text]:
            raise ConfigError(
                f"data.special_tokens: text: too many special tokens of {length} characters, such as {text}; leave the "
                "setting at control"
            )
    return names


def _renamed(tokenizer: "PreTrainedTokenizerFast", names: dict[str, str]) -> "Tokenizer":
    """A copy with other names of special tokens, without truncation, padding and post-processor."""
    backend = cast("Tokenizer", tokenizer.backend_tokenizer)
    state = json.loads(backend.to_str())
    state |= {"truncation": None, "padding": None, "post_processor": None}
    for token in state["added_tokens"]:
        if token["special"]:
            token |= {"content": names[token["content"]], "normalized": False}
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        return type(backend).from_str(json.dumps(state))
    except Exception as error:  # the reader raises plain Exception
        raise ConfigError(
            f"data.special_tokens: text: the special tokens of the tokenizer in {tokenizer.name_or_path} cannot have "
            f"other names: {error}; leave the setting at control"
        ) from error
