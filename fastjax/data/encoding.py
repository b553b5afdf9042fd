"""Texts and conversations to token ids, with a mask of the tokens that the model learns.

Conversations go through the chat template, texts as they are. Both begin with a BOS exactly when the tokenizer begins
texts with one, and with one only, whether the template writes it or not. Both end in a token that ends a turn and is
learnt: the one that the template writes after a response (Llama 3's `<|eot_id|>`), else the tokenizer's EOS. What a
template writes behind that token (ChatML's newline) is not learnt: no one will ask the model for it.

A token belongs to a response when any of its characters does. The tokenizer's own record of where its tokens lie says
so (`char_to_token`), and no string is searched for.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import numpy as np
from jaxtyping import Bool, Int32

from fastjax.data.sources import ChatRecord, Message, Record
from fastjax.data.template import ChatTemplate, RenderedChat
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

LossOn = Literal["responses", "all"]
"""Which tokens are learnt: what the assistant says, or every token."""

CHUNK = 1000
"""Examples that go through the tokenizer together: enough for all its threads."""


class Example(NamedTuple):
    """One example as tokens.

    Attributes:
        tokens: The token ids.
        learn: True for the tokens that the model learns to predict; False for the first, which nothing predicts.
    """

    tokens: Int32[np.ndarray, " N"]
    learn: Bool[np.ndarray, " N"]


class Encoder:
    """A tokenizer with its chat template, and what is learnt of an example."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", loss_on: LossOn = "responses"):
        """Look at what the tokenizer adds to a text, and at its chat template.

        Args:
            tokenizer: A tokenizer with a Rust backend. It needs an EOS token.
            loss_on: "responses": the assistant's words and the end of its turns, and all of a plain text; "all":
                every token.

        Raises:
            ConfigError: An unknown `loss_on`, or a tokenizer without EOS.
        """
        if loss_on not in get_args(LossOn):
            raise ConfigError(f"loss_on must be one of {', '.join(get_args(LossOn))}, given {loss_on!r}")
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer in {tokenizer.name_or_path} has no eos_token, so no end can be learnt")
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self._backend = cast("Tokenizer", tokenizer.backend_tokenizer)
        self._eos = cast(int, tokenizer.eos_token_id)
        self._bos = self._find_bos()
        self._special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template; a ConfigError when it has none."""
        if self._template is None:
            self._template = ChatTemplate.from_tokenizer(self.tokenizer)
        return self._template

    def encode(self, records: Sequence[Record]) -> Iterator[Example]:
        """Encode examples, `CHUNK` at a time.

        Args:
            records: The examples as they were read.

        Yields:
            One example a record, in order. One without any response has nothing to learn, but is no error.

        Raises:
            ConfigError: A conversation, and a tokenizer without chat template.
            DataError: The chat template refuses a conversation.
        """
        for start in range(0, len(records), CHUNK):
            chunk = records[start : start + CHUNK]
            chats = [self._render(record) for record in chunk]
            for record, chat, encoding in zip(chunk, chats, self._encode_texts(chats), strict=True):
                yield self._example(encoding, chat, templated=isinstance(record, ChatRecord))

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation that the assistant is to continue, exactly as training sees its beginning.

        Args:
            messages: The messages so far.

        Returns:
            The token ids, generation prompt included.

        Raises:
            ConfigError: The tokenizer has no chat template.
            DataError: The chat template refuses the conversation.
        """
        text = self.template.render(messages, "the prompt", add_generation_prompt=True)
        return self._with_bos(self._backend.encode(text, add_special_tokens=False).ids)

    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response: EOS, and what the chat template ends the assistant's turn with.

        Returns:
            Token ids, at least one.
        """
        stops = [self._eos]
        if self.tokenizer.chat_template:
            probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            (example,) = self.encode([ChatRecord(probe, "a probe of the chat template")])
            last = int(example.tokens[example.learn][-1])
            stops += [last] if last != self._eos else []
        return tuple(stops)

    def _find_bos(self) -> int | None:
        """The BOS, if the tokenizer puts it before a text."""
        plain, framed = (self._backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        bos = cast(int | None, self.tokenizer.bos_token_id)
        return bos if bos is not None and framed[:1] == [bos] and plain[:1] != [bos] else None

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self._bos:
            start += 1
        return [self._bos, *ids[start:]]

    def _render(self, record: Record) -> RenderedChat:
        if isinstance(record, ChatRecord):
            if self.loss_on == "responses":
                return self.template.render_with_responses(record.messages, record.where)
            text = self.template.render(record.messages, record.where)
        else:
            text = record.text
        return RenderedChat(text, [(0, len(text))])

    def _encode_texts(self, chats: Sequence[RenderedChat]) -> "list[Encoding]":
        return self._backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)

    def _example(self, encoding: "Encoding", chat: RenderedChat, *, templated: bool) -> Example:
        ids = encoding.ids
        learn = np.zeros(len(ids), bool)
        spans = [_token_span(encoding, start, end) for start, end in chat.responses]
        for start, end in spans:
            learn[start : self._end_of_turn(encoding, chat.text, start, end)] = True
        # An end is learnt unless someone else than the assistant has the last word.
        needs_end = bool(spans) and spans[-1][1] == len(ids)
        tokens = self._with_bos(ids)
        added = len(tokens) - len(ids)
        learn = np.concatenate([np.zeros(max(added, 0), bool), learn[max(-added, 0) :]])
        if needs_end and not self._has_end(tokens, learn, templated):
            tokens = [*tokens, self._eos]
            learn = np.append(learn, True)
        learn[:1] = False
        return Example(np.asarray(tokens, np.int32), learn)

    def _has_end(self, tokens: list[int], learn: Bool[np.ndarray, " N"], templated: bool) -> bool:
        """Whether the last token learnt ends a text (EOS) or, written by a template, a turn (any special token)."""
        learnt = np.flatnonzero(learn)
        if learnt.size == 0:
            return False
        last = tokens[learnt[-1]]
        return last == self._eos or (templated and last in self._special)

    def _end_of_turn(self, encoding: "Encoding", text: str, start: int, end: int) -> int:
        """The end of the tokens [start, end) without the white space behind the special token that ends the turn."""
        last = end
        while last > start and encoding.ids[last - 1] not in self._special:
            chars = encoding.token_to_chars(last - 1)
            if chars is not None and text[chars[0] : chars[1]].strip():
                return end
            last -= 1
        return last if last > start else end


def _token_span(encoding: "Encoding", start: int, end: int) -> tuple[int, int]:
    """The range of tokens that share a character with the characters [start, end)."""
    first = next((t for t in map(encoding.char_to_token, range(start, end)) if t is not None), None)
    if first is None:
        # Nothing was said: an empty range, behind all tokens, which is where it matters (a missing end of turn).
        return len(encoding), len(encoding)
    last = next(t for t in map(encoding.char_to_token, range(end - 1, start - 1, -1)) if t is not None)
    # The bytes of one character may be several tokens; char_to_token gives the first.
    while last + 1 < len(encoding) and encoding.token_to_chars(last + 1) == encoding.token_to_chars(last):
        last += 1
    return first, last + 1
