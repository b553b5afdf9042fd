"""Encodings in which a prompt has the tokens that it has without its answer.

Generation encodes the prompt alone, so a token across the border ("of" + "ten", or a space before a word) would be
learnt where generation never asks for it, and white space at the prompt's end may be divided otherwise before a word.
Prompt and answer are then encoded apart.
"""

import bisect
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_GUARDS = ("\n", "a", ".", "0")
"""Characters in the place of the prompt's last one, of which one makes no token with an answer."""


_LOOK_BACK = 32
"""Characters before the white space at a border that are encoded anew to compare its tokens."""


class Joined:
    """Encodings of successive parts of a text as one; the methods are those of `tokenizers.Encoding`.

    Attributes:
        ids: Token ids.
        offsets: The range of characters of each.
    """

    def __init__(self, ids: list[int], offsets: list[tuple[int, int]]):
        self.ids, self.offsets = ids, offsets
        self._starts = [start for start, _ in offsets]

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, char_pos: int, /) -> int | None:
        """The first token that holds a character."""
        behind = bisect.bisect_right(self._starts, char_pos)
        if not behind or self.offsets[behind - 1][1] <= char_pos:
            return None
        return bisect.bisect_left(self._starts, self._starts[behind - 1])

    def token_to_chars(self, token_index: int, /) -> tuple[int, int]:
        """The range of characters of a token."""
        return self.offsets[token_index]


TokenOffsets: TypeAlias = "Encoding | Joined"


def encoded_apart(
    backend: "Tokenizer", text: str, encoding: TokenOffsets, borders: Iterable[int]
) -> tuple[TokenOffsets, bool]:
    """Encode the parts of a text apart where a token spans a border, or the tokens before it depend on what follows.

    Args:
        backend: The tokenizer.
        text: The text.
        encoding: Its encoding as a whole, without special tokens around it.
        borders: Places of characters at which an answer begins.

    Returns:
        An encoding, the same one where no part is; and whether one could not be.
    """
    spanned = sorted(
        border for border in set(borders) if _spans(encoding, border) or not _alike(backend, text, encoding, border)
    )
    if not spanned:
        return encoding, False
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    start = 0
    for end in [*spanned, len(text)]:
        part = _behind(backend, text[start:end]) if start else _plain(backend, text[:end])
        if part is None:
            return encoding, True
        ids += part[0]
        offsets += [(start + first, start + last) for first, last in part[1]]
        start = end
    return Joined(ids, offsets), False


def _spans(encoding: TokenOffsets, border: int) -> bool:
    """Whether a token has characters on both sides of a border."""
    token = encoding.char_to_token(border)
    chars = None if token is None else encoding.token_to_chars(token)
    return chars is not None and chars[0] < border


def _alike(backend: "Tokenizer", text: str, encoding: TokenOffsets, border: int) -> bool:
    """Whether the tokens before a border are those of the text that ends there.

    They can differ behind white space alone: GPT-2's rule and its successors divide it by what follows.
    """
    behind = encoding.char_to_token(border)
    if behind is None or not text[border - 1].isspace():
        return True
    first = encoding.char_to_token(max(0, len(text[:border].rstrip()) - _LOOK_BACK)) or 0
    start = encoding.offsets[first][0]
    part = _behind(backend, text[start:border]) if start else _plain(backend, text[:border])
    return part is not None and part[0] == encoding.ids[first:behind]


def _plain(backend: "Tokenizer", text: str) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = backend.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets


def _behind(backend: "Tokenizer", text: str) -> tuple[list[int], list[tuple[int, int]]] | None:
    """The tokens of a text that follows on another, without the space that some tokenizers put before a whole text."""
    for guard in _GUARDS:
        encoding = backend.encode(guard + text, add_special_tokens=False)
        first = encoding.char_to_token(len(guard))
        if first is not None and not _spans(encoding, len(guard)):
            shifted = [(start - len(guard), end - len(guard)) for start, end in encoding.offsets[first:]]
            return encoding.ids[first:], shifted
    return None
