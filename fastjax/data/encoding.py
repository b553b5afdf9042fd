"""Texts and conversations to token ids, with a mask of the tokens that the model learns.

Conversations go through the chat template, texts as they are. Both begin with a BOS exactly when the tokenizer begins
texts with one, and with one only, whether the template writes it or not. Both end in a token that ends a turn and is
learnt: the one that the template writes after a response (Llama 3's `<|eot_id|>`), else the tokenizer's EOS. What a
template writes behind that token (ChatML's newline) is not learnt: no one will ask the model for it.

A token belongs to a response when any of its characters does. The tokenizer's own record of where its tokens lie says
so (`char_to_token`), and no string is searched for.

Examples go through in chunks and come out in flat arrays: what Python does for each is a few calls, not one for each
token.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from fastjax.data.examples import Examples
from fastjax.data.records import ChatRecord, Message, Record
from fastjax.data.settings import LossOn
from fastjax.data.template import ChatTemplate, RenderedChat
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

CHUNK = 8_000_000
"""Characters that go through the tokenizer together. Its results take some 400 bytes a token until they are freed, and
freeing often is slow: chunks of a thousand examples cost a fifth more time."""


class Encoder:
    """A tokenizer with its chat template, and what is learnt of an example."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", loss_on: LossOn = "responses"):
        """Look at what the tokenizer adds to a text, and at its chat template.

        Args:
            tokenizer: A tokenizer with a Rust backend. It needs an EOS token.
            loss_on: "responses": the assistant's words and the end of its turns, a completion, and all of a plain
                text; "last_response": of a conversation only the last of these; "all": every token.

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

    def encode(self, records: Iterable[Record]) -> Iterator[Examples]:
        """Encode examples, `CHUNK` characters at a time.

        Args:
            records: The examples as they were read.

        Yields:
            The examples, in order, chunk after chunk. One without any response has nothing to learn, but is no error.

        Raises:
            ConfigError: A conversation, and a tokenizer without chat template.
            DataError: The chat template refuses a conversation.
        """
        chats: list[RenderedChat] = []
        templated: list[bool] = []
        size = 0
        for record in records:
            chats.append(self._render(record))
            templated.append(isinstance(record, ChatRecord))
            size += len(chats[-1].text)
            if size >= CHUNK:
                yield self._encode_chunk(chats, templated)
                chats, templated, size = [], [], 0
        if chats:
            yield self._encode_chunk(chats, templated)

    def texts(self, records: Iterable[Record]) -> list[str]:
        """What goes through the tokenizer for examples.

        Args:
            records: The examples.

        Returns:
            Their texts, conversations as the chat template renders them.
        """
        return [self._render(record).text for record in records]

    def encode_prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Encode a conversation that the assistant is to continue, exactly as training sees its beginning.

        Args:
            messages: The messages so far.
            tools: The functions that the assistant may call.

        Returns:
            The token ids, generation prompt included.

        Raises:
            ConfigError: The tokenizer has no chat template.
            DataError: The chat template refuses the conversation.
        """
        return self.encode_beginning(
            self.template.render(messages, "the prompt", tools=tools, add_generation_prompt=True)
        )

    def encode_beginning(self, text: str) -> list[int]:
        """Encode a text that the model is to continue, exactly as training sees its beginning.

        Args:
            text: The text so far.

        Returns:
            The token ids, without the EOS that a whole text ends in.
        """
        return self._with_bos(self._backend.encode(text, add_special_tokens=False).ids)

    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response: EOS, and what the chat template ends the assistant's turn with.

        Returns:
            Token ids, at least one.
        """
        stops = [self._eos]
        if self.tokenizer.chat_template:
            probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            ((example,),) = self.encode([ChatRecord(probe, "a probe of the chat template")])
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

    def _encode_chunk(self, chats: Sequence[RenderedChat], templated: Sequence[bool]) -> Examples:
        encodings = self._backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        ids: list[list[int]] = []
        starts: list[int] = []
        ends: list[int] = []
        total = 0
        for chat, by_template, encoding in zip(chats, templated, encodings, strict=True):
            tokens, spans = self._spans(encoding, chat, by_template)
            ids.append(tokens)
            # Nothing predicts the first token.
            starts += [total + max(start, 1) for start, end in spans if end > 1]
            ends += [total + end for _, end in spans if end > 1]
            total += len(tokens)
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int32, total)
        depth = np.bincount(starts, minlength=total + 1) - np.bincount(ends, minlength=total + 1)
        return Examples(flat, np.cumsum(depth[:total]) > 0, offsets)

    def _render(self, record: Record) -> RenderedChat:
        if isinstance(record, ChatRecord):
            if self.loss_on == "all":
                text = self.template.render(record.messages, record.where, tools=record.tools)
                return RenderedChat(text, [(0, len(text))])
            return self.template.render_with_responses(
                record.messages,
                record.where,
                tools=record.tools,
                given=record.prompt,
                last=self.loss_on == "last_response",
            )
        start = 0 if self.loss_on == "all" else record.prompt
        return RenderedChat(record.text, [(start, len(record.text))] if record.text else [])

    def _spans(
        self, encoding: "Encoding", chat: RenderedChat, templated: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of an example and the ranges of those that are learnt."""
        ids = encoding.ids
        length = len(ids)
        spans = [_token_span(encoding, start, end) for start, end in chat.responses]
        # An end is learnt unless someone else than the assistant has the last word.
        needs_end = bool(spans) and spans[-1][1] == length
        if chat.marked:
            marked = [self._marked_end(ids, start, end) for start, end in spans]
            if spans and marked[-1][1] < length and not self._ends(ids, marked[-1], templated):
                needs_end = not chat.text[chat.responses[-1][1] :].strip()
                marked[-1] = (marked[-1][0], length) if needs_end else marked[-1]
            spans = marked
        elif templated:
            spans = [(start, self._end_of_turn(encoding, ids, chat.text, start, end)) for start, end in spans]
        needs_end = needs_end and not self._ends(ids, spans[-1], templated)
        if self._bos is not None:
            ids = self._with_bos(ids)
            added = len(ids) - length
            spans = [(start + added, end + added) for start, end in spans]
        if needs_end:
            ids = [*ids, self._eos]
            spans[-1] = (min(spans[-1][0], len(ids) - 1), len(ids))
        return ids, spans

    def _ends(self, ids: list[int], span: tuple[int, int], templated: bool) -> bool:
        """Whether the last token learnt ends a text (EOS) or, written by a template, a turn (any special token)."""
        if span[1] <= span[0]:
            return False
        last = ids[span[1] - 1]
        return last == self._eos or (templated and last in self._special)

    def _marked_end(self, ids: list[int], start: int, end: int) -> tuple[int, int]:
        """What a template marks as a response, with the special token that ends the turn right behind it."""
        if end < len(ids) and not self._ends(ids, (start, end), templated=True) and ids[end] in self._special:
            end += 1
        return start, end

    def _end_of_turn(self, encoding: "Encoding", ids: list[int], text: str, start: int, end: int) -> int:
        """The end of the tokens [start, end) without the white space behind the special token that ends the turn."""
        last = end
        while last > start and ids[last - 1] not in self._special:
            chars = encoding.token_to_chars(last - 1)
            if chars is not None and text[chars[0] : chars[1]].strip():
                return end
            last -= 1
        return last if last > start else end


def _token_span(encoding: "Encoding", start: int, end: int) -> tuple[int, int]:
    """The range of tokens that share a character with the characters [start, end)."""
    first = encoding.char_to_token(start) if start < end else None
    if first is None:  # a character without a token, such as white space that the tokenizer strips
        first = next((t for t in map(encoding.char_to_token, range(start, end)) if t is not None), None)
    if first is None:  # nothing was said: an empty range before the token that follows
        place = encoding.char_to_token(end)
        return (len(encoding), len(encoding)) if place is None else (place, place)
    last = encoding.char_to_token(end - 1)
    if last is None:
        last = next(t for t in map(encoding.char_to_token, range(end - 1, start - 1, -1)) if t is not None)
    # The bytes of one character may be several tokens; char_to_token gives the first.
    while last + 1 < len(encoding) and encoding.token_to_chars(last + 1) == encoding.token_to_chars(last):
        last += 1
    return first, last + 1
