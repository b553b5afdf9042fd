"""Text of token ids that arrive one by one: joined, it is what the tokenizer's `decode` gives for all of them.

Two kinds of tokenizers are told apart by their decoder. Where tokens stand for bytes (GPT-2's kind), the bytes go
through an incremental UTF-8 decoder. Elsewhere (SentencePiece's kind) a token's text is what it adds to the text of the
token before it, so that a space at its beginning stays; a run of byte tokens (`<0xF0>`) is decoded when it has ended,
since the tokenizer writes U+FFFD for every byte of a run that is not valid as a whole.

An answer's text leaves special tokens out; their names are told beside it, for stop strings. A token costs the same
wherever in the answer it stands.
"""

import codecs
import functools
import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


class Part(NamedTuple):
    """Text that tokens have added.

    Attributes:
        text: the characters.
        shown: whether they belong to the answer's text; False: a special token's name.
    """

    text: str
    shown: bool = True


class TokenText(Protocol):
    """The text of tokens so far, special tokens included.

    Attributes:
        starts: of each token the place in this text at which its own begins, in characters. A token that goes on with a
            character begins where this does.
        length: of the text that was given out, in characters.
    """

    starts: list[int]
    length: int

    def add(self, token: int) -> Part:
        """Text that is certain by now, behind that of the calls before.

        Args:
            token: the next id.
        """
        ...

    def finish(self) -> str:
        """The rest of the text, when no token follows: a broken character at the end is U+FFFD."""
        ...


def token_text(tokenizer: "PreTrainedTokenizerBase") -> TokenText:
    """The text of an answer's tokens, none so far.

    Args:
        tokenizer: with a Rust backend; left as it is.
    """
    backend, kind = _backend(tokenizer)
    return _Bytes(backend) if kind == "bytes" else _Pieces(backend, byte_tokens=kind == "pieces or bytes")


def _backend(tokenizer: "PreTrainedTokenizerBase") -> tuple["Tokenizer", str]:
    """The Rust backend, and what tokens stand for: "bytes", "pieces", or "pieces or bytes"."""
    backend = cast("Tokenizer", tokenizer.backend_tokenizer)  # pyright: ignore[reportAttributeAccessIssue]
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    parts = [part["type"] for part in decoder.get("decoders", [decoder]) if part]
    if parts and parts[0] == "ByteLevel" and set(parts) <= {"ByteLevel", "Fuse"}:
        return backend, "bytes"
    return backend, "pieces or bytes" if "ByteFallback" in parts else "pieces"


def token_bytes(tokenizer: "PreTrainedTokenizerBase") -> Callable[[int], bytes]:
    """A function from a token to its bytes within a text; of a special token they are its name's, of no token none.

    Args:
        tokenizer: with a Rust backend; left as it is.
    """
    backend, kind = _backend(tokenizer)

    def of_bytes(token: int) -> bytes:
        piece = backend.id_to_token(token) or ""
        return piece.encode() if _special(backend, token) else _bytes_of(piece)

    def of_pieces(token: int) -> bytes:
        piece = backend.id_to_token(token) or ""
        value = None if kind == "pieces" else _byte_of(piece)
        if value is not None:
            return bytes([value])
        return piece.encode() if _special(backend, token) else piece.replace("▁", " ").encode()

    return of_bytes if kind == "bytes" else of_pieces


class _Bytes:
    """Text of tokens that stand for bytes."""

    def __init__(self, backend: "Tokenizer"):
        self._backend = backend
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.starts: list[int] = []
        self.length = 0

    def add(self, token: int) -> Part:
        self.starts.append(self.length)
        piece = self._backend.id_to_token(token) or ""
        if _special(self._backend, token):  # the tokenizer leaves it out before it decodes
            self.length += len(piece)
            return Part(piece, shown=False)
        data = _bytes_of(piece)
        # What begins a character says that a half of one before it is broken.
        text = self.finish() if data and data[0] & 0xC0 != 0x80 else ""
        self.starts[-1] = self.length
        more = self._decoder.decode(data)
        self.length += len(more)
        return Part(text + more)

    def finish(self) -> str:
        text = self._decoder.decode(b"", True)
        self.length += len(text)
        return text


class _Pieces:
    """Text of tokens that stand for characters, some of them perhaps for single bytes."""

    def __init__(self, backend: "Tokenizer", *, byte_tokens: bool):
        self._backend, self._byte_tokens = backend, byte_tokens
        self._before: list[int] = []  # the last token
        self._run: list[int] = []  # byte tokens
        self._values: dict[int, int] = {}  # number of such a token in the answer -> its byte
        self.starts: list[int] = []
        self.length = 0

    def add(self, token: int) -> Part:
        self.starts.append(self.length)
        piece = self._backend.id_to_token(token) or ""
        if _special(self._backend, token):  # it does not even end a run: the tokenizer leaves it out before it decodes
            self.length += len(piece)
            return Part(piece, shown=False)
        value = _byte_of(piece) if self._byte_tokens else None
        if value is not None:
            self._run.append(token)
            self._values[len(self.starts) - 1] = value
            return Part("")
        text = self.finish()
        self.starts[-1] = self.length
        return Part(text + self._added([token]))

    def finish(self) -> str:
        if not self._run:
            return ""
        first, run, values = self.length, self._run, self._values
        self._run, self._values = [], {}
        text = self._added(run)
        begun = list(itertools.accumulate(int(value & 0xC0 != 0x80) for value in values.values()))
        whole = begun[-1] == len(text)  # else each byte is a character
        offsets = dict(zip(values, (count - 1 for count in begun) if whole else range(len(values)), strict=True))
        place = first
        for index in range(next(iter(values)), len(self.starts)):
            place = first + offsets[index] if index in offsets else place
            self.starts[index] = place
        return text

    def _added(self, tokens: list[int]) -> str:
        """The text that tokens add to that of the token before."""
        before = self._backend.decode(self._before, skip_special_tokens=False)
        text = self._backend.decode([*self._before, *tokens], skip_special_tokens=False)[len(before) :]
        self._before = tokens[-1:]
        self.length += len(text)
        return text


def _special(backend: "Tokenizer", token: int) -> bool:
    """Whether an id is that of a special token, or of none. Twice, since a space alone may be stripped."""
    return not backend.decode([token, token], skip_special_tokens=True)


def _byte_of(piece: str) -> int | None:
    """The byte that a token such as <0xF0> stands for; None for any other."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def _bytes_of(piece: str) -> bytes:
    """The bytes of a token of GPT-2's kind; a token that was added is its own text."""
    alphabet = _alphabet()
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:
        return piece.encode()


@functools.cache
def _alphabet() -> dict[str, int]:
    """GPT-2's characters of the bytes: printable ones are themselves, the others are numbered from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}
