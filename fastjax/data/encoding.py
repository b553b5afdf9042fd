"""Texts and conversations to token ids, with a mask of the tokens that the model learns.

The chat template renders conversations; texts stay as they are. Both begin with exactly one BOS if the tokenizer begins
texts with one, whether the template writes it or not. Both end in a learnt token that ends a turn: the template's,
after a response (Llama 3's `<|eot_id|>`), else the tokenizer's EOS. The template's text behind that token (ChatML's
newline) is not learnt: generation stops before it.

A prompt's tokens are those of generation: a token that would span its end and the answer's beginning is divided
(`boundaries`). Otherwise a token belongs to a response if any part of its characters does: a character may be several
tokens, and a token a space and half of an emoji. The tokenizer's own offsets decide (`char_to_token`), never a
search for a string.

Special tokens in a row's content are control tokens, as anywhere in the tokenizer's input, or on request text; rows
with any are counted.

Examples are encoded in chunks to flat arrays, with a few Python calls an example and none a token.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from convert.errors import shown
from fastjax.data.boundaries import TokenOffsets, encoded_apart
from fastjax.data.columns import check_options
from fastjax.data.continued import cut, marked
from fastjax.data.documents import Examples
from fastjax.data.notes import JOINED, SPECIAL
from fastjax.data.records import ChatRecord, Message, Record, TokenRecord, Written
from fastjax.data.responses import Conversation
from fastjax.data.settings import NO_CACHE, DataOptions
from fastjax.data.special_texts import ContentAsText, SpecialTexts
from fastjax.data.template import ChatTemplate, RenderedChat
from fastjax.data.template_environment import strftime_at
from fastjax.data.token_rows import token_spans
from fastjax.data.tokenizer import check_post_processor
from fastjax.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

CHUNK = 8_000_000
"""Characters in a batch of the tokenizer. Its results take some 400 bytes a token until they are freed, and freeing
often is slow: chunks of a thousand examples cost a fifth more time."""


class Encoder:
    """A tokenizer with its chat template, and the choice of target tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", options: DataOptions = NO_CACHE, now: str | None = None):
        """Read the tokenizer's special tokens.

        Args:
            tokenizer: A tokenizer with a Rust backend. It needs an EOS token.
            options: The target tokens, `loss_on`: "responses" are the assistant's words and the end of its turns, a
                completion, and all of a plain text; the reading of special tokens; the chat template's variables.
            now: The time that the chat template's `strftime_now` tells, in ISO 8601; None: that of each call.

        Raises:
            ConfigError: A tokenizer without EOS, or one that cannot read special tokens as text, or adds tokens that it
                has no ids for.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer in {tokenizer.name_or_path} has no eos_token, so no end can be learnt")
        self.tokenizer = tokenizer
        self.options = options
        self._roles = tuple(options.loss_on) if isinstance(options.loss_on, list) else ("assistant",)
        self._special_texts = SpecialTexts(tokenizer)
        self._as_text = ContentAsText(tokenizer, self._special_texts) if options.special_tokens == "text" else None
        self._backend = (
            self._as_text.backend if self._as_text else _plain(cast("Tokenizer", tokenizer.backend_tokenizer))
        )
        self._eos = cast(int, tokenizer.eos_token_id)
        self._bos = self._find_bos()
        self._told = {} if now is None else {"strftime_now": strftime_at(now)}
        self._variables = self._told | check_options(options.chat_template_kwargs or {}, "chat_template_kwargs")
        self._template: ChatTemplate | None = None

    def with_variables(self, variables: dict[str, Any]) -> "Encoder":
        """An encoder with other variables of the chat template; the tokenizer is not read again.

        Args:
            variables: in place of the options' chat_template_kwargs.

        Raises:
            DataError: variables that are none.
        """
        made = copy.copy(self)
        made.options = dataclasses.replace(self.options, chat_template_kwargs=variables)
        made._variables = self._told | check_options(variables, "chat_template_kwargs")
        made._template = None
        vars(made).pop("_ends_of_turns", None)
        return made

    @property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template; without one a ConfigError."""
        if self._template is None:
            self._template = ChatTemplate.from_tokenizer(self.tokenizer, self._variables)
        return self._template

    @functools.cached_property
    def _ends_of_turns(self) -> frozenset[int]:
        """The tokens that may end a turn."""
        ids = self._special_texts.ids
        if not self.tokenizer.chat_template:
            return frozenset(ids.values())
        return frozenset((ids | self.tokenizer.get_added_vocab())[text] for text in self.template.turns.ends)

    def encode(self, records: Iterable[Record], *, apart: bool = True) -> Iterator[Examples]:
        """Encode examples, `CHUNK` characters at a time.

        Args:
            records: The examples.
            apart: Whether a conversation whose template rewrites the past becomes several, one for each answer that it
                has otherwise; else it is refused.

        Yields:
            The examples, in order, chunk after chunk. One without a response has no targets and is no error.

        Raises:
            ConfigError: A conversation, and a tokenizer without chat template.
            DataError: The chat template refuses a conversation.
        """
        chats: list[tuple[int, RenderedChat | TokenRecord, bool]] = []
        noted: dict[str, list[int]] = {}
        count = size = 0
        instructed, answered = False, ""
        for record in records:
            if isinstance(record, TokenRecord):
                chats.append((count, record, False))
                size += len(record.tokens)
            else:
                if self._holds_special(record):
                    noted.setdefault(SPECIAL, []).append(count)
                rendered, templated = self._render(record), isinstance(record, ChatRecord) or self._has_parts(record)
                if len(rendered) > 1 and not apart:
                    raise DataError(
                        f"{record.where}: the chat template rewrites earlier answers when messages follow, so these "
                        "cannot be scored in one text; give the answers before the last one as part of the prompt"
                    )
                for kind in sorted(set[str]().union(*(chat.left_out for chat in rendered))):
                    noted.setdefault(kind, []).append(count)
                if isinstance(self.options.loss_on, dict) and templated and not isinstance(record, ChatRecord):
                    instructed = instructed or self.options.loss_on["instruction_part"] in record.text
                    answered = answered or (record.where if rendered[0].responses else "")
                chats += [(count, chat, templated) for chat in rendered]
                size += sum(len(chat.text) for chat in rendered)
            count += 1
            if size >= CHUNK:
                yield self._encode_chunk(chats, noted)
                chats, noted, count, size = [], {}, 0, 0
        if answered and not instructed:
            begins = shown(cast(dict[str, str], self.options.loss_on)["instruction_part"])
            raise DataError(
                f"{answered}: a response_part stands in it, but the instruction_part, {begins}, in no text, so that "
                "what the user says would be learnt; expected the text that begins an instruction there"
            )
        if count:
            yield self._encode_chunk(chats, noted)

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Encode a conversation for the assistant to continue, with the tokens of its beginning in training.

        Args:
            messages: The messages so far.
            tools: The functions that the assistant may call.
            continue_final_message: The last message is the beginning of the answer, or of its reasoning.

        Returns:
            The token ids, generation prompt included.

        Raises:
            ConfigError: The tokenizer has no chat template, or there is no answer to be continued.
            DataError: The chat template refuses the conversation.
        """
        if self._as_text:
            messages, tools = (self._as_text.hidden(value, "the prompt") for value in (list(messages), tools))
        messages = marked(messages, "the prompt") if continue_final_message else messages
        new_turn = not continue_final_message
        text = self.template.render(messages, "the prompt", {"tools": tools}, add_generation_prompt=new_turn).text
        text = cut(text, "the prompt") if continue_final_message else text
        check_characters(text, "the prompt")
        return self._beginning(self._as_text.shown(text) if self._as_text else text)

    def encode_beginning(self, text: str) -> list[int]:
        """Encode a text for the model to continue, with the tokens of its beginning in training.

        Args:
            text: The text so far.

        Returns:
            The token ids, without the EOS of a whole text.

        Raises:
            DataError: The text is not valid Unicode, or holds a reserved character.
        """
        check_characters(text, "the prompt")
        if self._as_text:
            self._as_text.check(text, "the prompt")
        return self._beginning(text)

    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response: EOS and the chat template's ends of the assistant's turn.

        The end of a turn that others follow, or that calls tools, may be another one than the last's.

        Returns:
            Token ids, at least one.
        """
        stops = [self._eos]
        if self.tokenizer.chat_template:
            probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            call = {"type": "function", "function": {"name": "c", "arguments": {}}}
            thought = [probe[0], {**probe[1], "reasoning_content": "c"}]
            amid = self._ends_in(thought)[1]  # the end of a thought may be that of an inner turn (gpt-oss)
            for chat in (probe, [probe[0], {"role": "assistant", "content": "", "tool_calls": [call]}]):
                stops += self._ends_in(chat)[0]
            stops += [token for token in self._ends_in(probe * 2)[0] if token not in amid]
        return tuple(dict.fromkeys(stops))

    def _ends_in(self, chat: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Ends of turns among a conversation's learnt tokens: those at the end of an answer, and those amid one."""
        last: list[int] = []
        amid: list[int] = []
        with contextlib.suppress(DataError):  # the template takes other conversations, or refuses each prompt
            (examples,) = self.encode([ChatRecord(list(chat), "a probe of the chat template")])
            for tokens, learn in map(examples.__getitem__, range(len(examples))):
                ends = np.isin(tokens, list(self._ends_of_turns))
                final = learn & ~np.append(learn[1:], False)
                last += tokens[ends & final].tolist()
                amid += tokens[ends & learn & ~final].tolist()
        return last, amid

    def _find_bos(self) -> int | None:
        """The BOS, if the tokenizer adds it to a text."""
        check_post_processor(self.tokenizer)
        backend = cast("Tokenizer", self.tokenizer.backend_tokenizer)
        plain, framed = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        bos = cast(int | None, self.tokenizer.bos_token_id)
        return bos if bos is not None and framed[:1] == [bos] and plain[:1] != [bos] else None

    def _beginning(self, text: str) -> list[int]:
        return self._with_bos(self._backend.encode(text, add_special_tokens=False).ids)

    def _holds_special(self, record: Written) -> bool:
        """Whether a row's content holds special tokens."""
        within = self._special_texts.within
        if isinstance(record, ChatRecord):
            return within(record.messages) or within(record.tools) or within(record.options)
        return within(record.text)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self._bos:
            start += 1
        return [self._bos, *ids[start:]]

    def _encode_chunk(
        self, chats: Sequence[tuple[int, RenderedChat | TokenRecord, bool]], noted: dict[str, list[int]]
    ) -> Examples:
        rendered = [chat for _, chat, _ in chats if isinstance(chat, RenderedChat)]
        encodings = iter(self._backend.encode_batch([chat.text for chat in rendered], add_special_tokens=False))
        ids: list[list[int]] = []
        starts: list[int] = []
        ends: list[int] = []
        total = 0
        for record, chat, by_template in chats:
            if isinstance(chat, TokenRecord):
                tokens, spans = token_spans(chat, self.options.loss_on)
            else:
                borders = (start for start, _ in chat.responses if start)
                encoding, joined = encoded_apart(self._backend, chat.text, next(encodings), borders)
                if joined and noted.setdefault(JOINED, [])[-1:] != [record]:
                    noted[JOINED].append(record)
                tokens, spans = self._spans(encoding, chat, by_template)
            ids.append(tokens)
            # Nothing predicts the first token.
            starts += [total + max(start, 1) for start, end in spans if end > 1]
            ends += [total + end for _, end in spans if end > 1]
            total += len(tokens)
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int32, total)
        depth = np.bincount(starts, minlength=total + 1) - np.bincount(ends, minlength=total + 1)
        return Examples(
            flat,
            np.cumsum(depth[:total]) > 0,
            offsets,
            noted,
            np.asarray([record for record, _, _ in chats], np.int64),
            sum(chat.elsewhere for chat in rendered),
        )

    def _render(self, record: Written) -> list[RenderedChat]:
        chats = self._read(record)
        for chat in chats:
            check_characters(chat.text, record.where)
        return chats

    def _read(self, record: Written) -> list[RenderedChat]:
        if self._as_text is None:
            return self._written(record)
        if isinstance(record, ChatRecord):
            messages, tools, options = (
                self._as_text.hidden(value, record.where) for value in (record.messages, record.tools, record.options)
            )
            chats = self._written(record._replace(messages=messages, tools=tools, options=options))
            return [chat._replace(text=self._as_text.shown(chat.text)) for chat in chats]
        self._as_text.check(record.text, record.where)
        return self._written(record)

    def _written(self, record: Written) -> list[RenderedChat]:
        """The texts of an example, written by the template or as it is, and what of them is learnt."""
        if isinstance(record, ChatRecord):
            if record.train is not None:
                self._check_train(record, record.train)
            chat = Conversation(
                self.template, record.messages, record.where, tools=record.tools, options=record.options
            )
            if self.options.loss_on == "all":
                return [chat.whole()]
            last = self.options.loss_on == "last_response"
            return chat.learnt(given=record.prompt, last=last, roles=self._roles, train=record.train)
        if self._has_parts(record):
            return [RenderedChat(record.text, _responses(record.text, **cast(dict[str, str], self.options.loss_on)))]
        start = 0 if self.options.loss_on == "all" else record.prompt
        return [RenderedChat(record.text, [(start, len(record.text))] if record.text else [])]

    def _has_parts(self, record: Written) -> bool:
        """Whether a record is a rendered conversation, whose responses are found by their beginning."""
        return isinstance(self.options.loss_on, dict) and not isinstance(record, ChatRecord) and not record.prompt

    def _check_train(self, record: ChatRecord, train: Sequence[bool | None]) -> None:
        """Raise DataError for a row whose `train` contradicts `loss_on`."""
        for index, (message, asked) in enumerate(zip(record.messages, train, strict=True)):
            place = f"{record.where}: messages[{index}]"
            if self.options.loss_on == "all":
                if asked is False:
                    raise DataError(
                        f"{place} is not to be learnt (train: false, or weight: 0), but loss_on is all, which learns "
                        "every token; set loss_on to responses, or leave it out"
                    )
            elif asked and (message["role"] not in self._roles or index < record.prompt):
                what = "part of the prompt" if index < record.prompt else f"the {message['role']}'s"
                whose = "what the assistant answers" if self._roles == ("assistant",) else " and ".join(self._roles)
                raise DataError(
                    f"{place} is to be learnt (train: true, or weight: 1), but is {what}, and only {whose} is learnt; "
                    "leave it out, name the role (loss_on takes a list of them), or learn every token (loss_on: all)"
                )

    def _spans(
        self, encoding: TokenOffsets, chat: RenderedChat, templated: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of an example and the ranges of its targets."""
        ids = encoding.ids
        length = len(ids)
        spans = [_token_span(encoding, start, end) for start, end in chat.responses]
        # An end is learnt unless someone else than the assistant has the last word.
        needs_end = bool(spans) and spans[-1][1] == length
        if chat.marked:
            trimmed = ((start, self._end_of_turn(encoding, ids, chat.text, start, end)) for start, end in spans)
            marked = [self._with_end(ids, start, end) for start, end in trimmed]
            if spans and marked[-1][1] < length and not self._ends(ids, marked[-1], templated):
                needs_end = not chat.text[chat.responses[-1][1] :].strip()
                marked[-1] = (marked[-1][0], length) if needs_end else marked[-1]
            spans = marked
        elif templated:
            trimmed = ((start, self._end_of_turn(encoding, ids, chat.text, start, end)) for start, end in spans)
            spans = [self._with_end(ids, start, end) for start, end in trimmed]
        needs_end = needs_end and not self._ends(ids, spans[-1], templated)
        if chat.others:
            others = [_token_span(encoding, start, end) for start, end in chat.others]
            spans = [(start, self._end_of_turn(encoding, ids, chat.text, start, end)) for start, end in others] + spans
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
        return last == self._eos or (templated and last in self._ends_of_turns)

    def _with_end(self, ids: list[int], start: int, end: int) -> tuple[int, int]:
        """A response, extended by the special token right behind it that ends the turn, as GLM's `<|user|>` does."""
        ends = self._ends(ids, (start, end), templated=True)
        if end < len(ids) and not ends and ids[end] in self._ends_of_turns and ids[end] != self._bos:
            end += 1
        return start, end

    def _end_of_turn(self, encoding: TokenOffsets, ids: list[int], text: str, start: int, end: int) -> int:
        """The end of the tokens [start, end) without the white space behind the special token that ends the turn."""
        last = end
        while last > start and ids[last - 1] not in self._ends_of_turns:
            chars = encoding.token_to_chars(last - 1)
            if chars is not None and text[chars[0] : chars[1]].strip():
                return end
            last -= 1
        return last if last > start else end


def _responses(text: str, instruction_part: str, response_part: str) -> list[tuple[int, int]]:
    """The ranges of characters behind each response_part up to the next instruction_part or the text's end."""
    spans, place = [], 0
    while (begin := text.find(response_part, place)) >= 0:
        start = begin + len(response_part)
        place = text.find(instruction_part, start)
        place = len(text) if place < 0 else place
        spans.append((start, place))
    return spans


def check_characters(text: str, where: str) -> None:
    """Raise DataError unless a text is valid Unicode.

    Args:
        text: The text.
        where: File and line, for the error.

    Raises:
        DataError: It holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(error.start - 20, 0) : error.start]
        raise DataError(
            f"{where}: expected Unicode text, found \\u{ord(text[error.start]):04x}, half of a surrogate pair, behind "
            f"{before!r}; remove it, or write both halves"
        ) from error


def _token_span(encoding: TokenOffsets, start: int, end: int) -> tuple[int, int]:
    """The range of tokens that share a character with the characters [start, end)."""
    first, last = (encoding.char_to_token(place) if start < end else None for place in (start, end - 1))
    if first is None or last is None:  # nothing was said, or a character has no token: the tokenizer strips it
        offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        held = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start) & (start < end))
        if len(held):
            return int(held[0]), int(held[-1]) + 1
        behind = np.flatnonzero(offsets[:, 1] > end)
        place = int(behind[0]) if len(behind) else len(offsets)
        return place, place
    # A character may be several tokens, of which char_to_token gives the first; that one may hold others too.
    while last + 1 < len(encoding) and cast(tuple[int, int], encoding.token_to_chars(last + 1))[0] < end:
        last += 1
    return first, last + 1


def _plain(backend: "Tokenizer") -> "Tokenizer":
    """A tokenizer without truncation and padding, with offsets that cover every character."""
    processor = backend.post_processor
    trims = processor is not None and b'"trim_offsets":true' in processor.__getstate__()
    if backend.truncation is None and backend.padding is None and not trims:
        return backend
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    if trims:
        copy.post_processor = None  # it adds special tokens, which no text is encoded with here, and trims offsets
    return copy
