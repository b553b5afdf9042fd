"""Chat templates: messages to text and the ranges of the responses in it.

Templates are rendered in transformers' environment (`template_environment`), within limits of time and size
(`template_limits`).

If a template marks responses (`{% generation %} … {% endgeneration %}`), the marks are their ranges, and one rendering
is enough. Otherwise a response is the text added by the assistant's message: it lies between the rendering of all
messages before it, with the generation prompt, and the rendering of all messages up to it; a response is never
searched for. Where the whole conversation's text begins with both, but for the token that ends the turn (gpt-oss ends
the last one with another), the response is learnt there. Where it does not, since the template rewrites the past (Qwen3
and others cut the thoughts of earlier turns), it is learnt in a row of its own that ends with it: what generation sees.

A generation prompt may be no beginning of the answer's text, as one that opens a thought which the answer has not. Such
an answer is learnt from where the two part, and counted: generation begins it otherwise.

A message of another role begins where its content does, which a rendering with other content in its place shows, and
ends with its turn; the results of several tools in one turn are one range.
"""

import functools
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from convert.errors import shorten
from fastjax.data.left_out import left_out
from fastjax.data.records import Message
from fastjax.data.special_texts import SpecialTexts, any_of
from fastjax.data.template_environment import END, START, compile_template, variables_of
from fastjax.data.template_limits import BUDGET, SOURCE, Budget
from fastjax.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class RenderedChat(NamedTuple):
    """A conversation as text.

    Attributes:
        text: The rendered messages.
        responses: The range [start, end) of characters of each response to learn: as marked, or the text added by an
            assistant's message after the generation prompt, the end of its turn included.
        marked: Whether the template marked them.
        others: The range of each message of another role to learn, the end of its turn included.
        elsewhere: How many of the responses follow on another text than the generation prompt.
        left_out: Kinds of parts of the messages that no text of the conversation has (`fastjax.data.left_out`).
    """

    text: str
    responses: list[tuple[int, int]]
    marked: bool = False
    others: Sequence[tuple[int, int]] = ()
    elsewhere: int = 0
    left_out: Collection[str] = ()


class ChatTemplate:
    """A chat template and its special tokens."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        with_tools: str | None = None,
        ends: Collection[str] | None = None,
        options: Mapping[str, Any] | None = None,
        added: Collection[str] = (),
    ):
        """Compile a template.

        Args:
            source: The Jinja source.
            special_tokens: The template's variables `bos_token`, `eos_token` and the like.
            with_tools: The source for conversations with tools; None: the same.
            ends: Texts of all special tokens, of which some end a turn; None: those of `special_tokens`.
            options: Further variables of every conversation, as `enable_thinking`.
            added: Texts of other added tokens; one that the template writes behind answers ends a turn too.

        Raises:
            ConfigError: The source is not valid Jinja, or too long, or has none of the variables' names.
        """
        self._special_tokens, self._options = dict(special_tokens), dict(options or {})
        self._special = [end for end in (special_tokens.values() if ends is None else ends) if end]
        self._added = [token for token in added if token.strip()]
        self._template = _compiled(source)
        self._with_tools = self._template if with_tools is None else _compiled(with_tools)
        self._reads = variables_of(source) | variables_of(with_tools or "")
        if unread := sorted(self._options.keys() - self._reads):
            raise ConfigError(
                f"chat_template_kwargs: expected variables that the chat template reads, got {unread[0]}, which "
                f"stands nowhere in it; {shorten(', '.join(sorted(self._reads)), 300)} do"
            )

    @classmethod
    def from_tokenizer(
        cls, tokenizer: "PreTrainedTokenizerFast", options: Mapping[str, Any] | None = None
    ) -> "ChatTemplate":
        """A tokenizer's template.

        Args:
            tokenizer: The tokenizer.
            options: Further variables of every conversation.

        Returns:
            Its template; of several the one named "tool_use" where a conversation has tools, else "default".

        Raises:
            ConfigError: The tokenizer has no chat template, or several and none is the default.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template, which conversations need: "
                "name one (data.chat_template: chatml, llama3, mistral, gemma, alpaca, plain or a file), or give rows "
                "with 'text'"
            )
        sources, ends = tokenizer.chat_template, SpecialTexts(tokenizer).ids
        added = tokenizer.get_added_vocab().keys() - ends
        if isinstance(sources, str):
            return cls(sources, tokenizer.special_tokens_map, None, ends, options, added)
        if "default" not in sources:
            raise ConfigError(
                f"the tokenizer in {tokenizer.name_or_path} has chat templates named {', '.join(sorted(sources))}: "
                "expected one named default; give the one to use as a file (data.chat_template)"
            )
        return cls(sources["default"], tokenizer.special_tokens_map, sources.get("tool_use"), ends, options, added)

    @functools.cached_property
    def ends(self) -> frozenset[str]:
        """Texts of the tokens that may end a turn: all special ones, and added ones that stand behind an answer."""
        found, token = set(self._special), any_of(self._added)
        question, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}
        call = {"type": "function", "function": {"name": "b", "arguments": {"c": PROBE}}}
        for chat in ([question, said], [question, said, question]) if self._added else ():
            found |= set(token.findall(self._behind(chat))[:1])
        if found > set(self._special):
            found |= set(token.findall(self._behind([question, {**said, "content": "", "tool_calls": [call]}]))[-1:])
        return frozenset(found)

    def _behind(self, chat: Sequence[Message]) -> str:
        """The text behind the probe in a conversation; "" where the template refuses it."""
        try:
            return self.render(chat, "a probe").rpartition(PROBE)[2]
        except DataError:
            return ""

    @functools.cached_property
    def _end(self) -> re.Pattern[str]:
        return any_of(self.ends)

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self.ends), default=0)

    def render(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render messages as text.

        Args:
            messages: The messages in order.
            where: Their place, for errors.
            tools: The functions that the assistant may call.
            options: Further variables of the template, as `enable_thinking` or `documents`; they stand before the
                template's own.
            add_generation_prompt: Add the beginning of the assistant's turn.

        Returns:
            The text, special tokens included.

        Raises:
            DataError: The template refuses the messages.
        """
        return self._render(messages, where, {**(options or {}), "tools": tools}, add_generation_prompt).text

    def render_whole(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render a conversation of which every token is learnt.

        Args:
            messages: The messages in order.
            where: Their place, for errors.
            tools: The functions that the assistant may call.
            options: As of `render`.

        Returns:
            The text, one response.

        Raises:
            DataError: The template refuses the messages.
        """
        text = self.render(messages, where, tools=tools, options=options)
        said = {index: (text, text) for index, message in enumerate(messages) if message["role"] == "assistant"}
        return RenderedChat(
            text, [(0, len(text))], left_out=self._left_out(messages, {**(options or {}), "tools": tools}, text, said)
        )

    def render_with_responses(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        given: int = 0,
        last: bool = False,
        train: Sequence[bool | None] | None = None,
        roles: Sequence[str] = ("assistant",),
    ) -> list[RenderedChat]:
        """Render a conversation and find what of it is learnt.

        Args:
            messages: The messages in order.
            where: Their place, for errors.
            tools: The functions that the assistant may call.
            options: As of `render`.
            given: Messages at the beginning that are not learnt.
            last: Only the last response counts.
            train: Each message's flag; False: it is not learnt.
            roles: Whose messages are learnt.

        Returns:
            The text with the ranges in it of the responses and of the other messages, behind the beginnings of the
            conversation that end with a response which the text itself has otherwise, if any.

        Raises:
            DataError: The template refuses the messages, or does not keep what stands before a response.
        """
        variables = {**(options or {}), "tools": tools}
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in range(given, len(messages)) if not (train and train[i] is False)]
        learnt = [i for i in turns[-1 if last else 0 :] if i in wanted and "assistant" in roles]
        chat = self._render(messages, where, variables)
        others = [i for i in wanted if i not in turns and messages[i]["role"] in roles]
        chat = chat._replace(others=self._others(chat.text, messages, others, where, variables))
        said: dict[int, tuple[str, str]] = {}
        if chat.marked:
            chat = self._marks(chat, len(turns))
            rewritten = self._rewritten(chat.text, messages, learnt, where, variables)
            alone = [
                own._replace(
                    responses=self._marked(
                        own, messages[: index + 1], turns[: turns.index(index) + 1], [index], where, variables
                    )
                )
                for index, own in rewritten.items()
            ]
            kept = [index for index in learnt if index not in rewritten]
            if len(turns) == len(chat.responses):
                for index in kept:
                    start, end = chat.responses[turns.index(index)]
                    said[index] = self._check_said(chat.text[start:end], messages, index, where), chat.text
            said |= {index: (own.text, own.text) for index, own in rewritten.items()}
            missing = self._left_out(messages, variables, chat.text, {i: (chat.text, chat.text) for i in kept} | said)
            responses = self._marked(chat, messages, turns, kept, where, variables)
            whole = chat._replace(responses=responses, left_out=missing)
            return [*alone, *([whole] if kept or whole.others or not alone else [])]
        alone, responses, elsewhere = [], [], 0
        for index in learnt:
            through = chat.text
            if index + 1 < len(messages):
                through = self._render(messages[: index + 1], where, variables).text
            through, start, follows = self._start(messages, index, through, where, variables)
            end, reached = self._turn(through, chat.text)
            said[index] = self._check_said(through[start:end], messages, index, where), through
            if reached is None or start > end:
                alone.append(RenderedChat(through, [(start, max(start, end))], elsewhere=not follows))
                continue
            responses.append((start, reached))
            elsewhere += not follows
        missing = self._left_out(messages, variables, chat.text, said)
        if alone and not responses and not chat.others:
            return [*alone[:-1], alone[-1]._replace(left_out=missing)]
        return [*alone, chat._replace(responses=responses, elsewhere=elsewhere, left_out=missing)]

    def _left_out(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        text: str,
        learnt: Mapping[int, tuple[str, str]],
    ) -> Collection[str]:
        """`left_out`, of the messages as the template sees them."""
        seen = [_with_reasoning(message) for message in messages]
        return left_out(seen, {**self._options, **variables}, text, learnt, self._reads)

    def _check_said(self, said: str, messages: Sequence[Message], index: int, where: str) -> str:
        """A turn's text; refused is one of which the template writes nothing but the end."""
        if self._end.sub("", said).strip():
            return said
        message = messages[index]
        given = {
            "tool calls": message.get("tool_calls"),
            "content": message.get("content"),
            "thought": _thought(message),
        }
        if what := next((kind for kind, it in given.items() if it and self._end.sub("", str(it)).strip()), ""):
            raise DataError(
                f"{where}: the chat template does not write the {what} of messages[{index}], so that only the end of "
                "its turn would be learnt; name a template that does (data.chat_template), or leave the turn out "
                "(train: false)"
            )
        return said

    def _start(
        self,
        messages: Sequence[Message],
        index: int,
        through: str,
        where: str,
        variables: Mapping[str, Any],
    ) -> tuple[str, int, bool]:
        """The text that ends with a response, its place, and whether all of the generation prompt stands before it.

        Where the text before is another one than generation sees, as gpt-oss' that drops the thoughts before a tool's
        call once the answer is there, the response stands behind the generation prompt instead.
        """
        question: list[Message] = [{"role": "user", "content": "a"}]
        if not index:  # a template may look at the first message, or write what comes before any with it
            opening, _ = self._opening([], question, where, variables)
            if opening and through.startswith(opening):
                return through, len(opening), True
        prompt = self._render(messages[:index], where, variables, True).text
        if through.startswith(prompt):
            return through, len(prompt), True
        start = self._whole_tokens(len(os.path.commonprefix([prompt, through])), prompt, through)
        before = self._core(self._render(messages[:index], where, variables).text)[0] if index else ""
        if start < len(before):
            opening, head = self._opening(messages[:index], messages[:index], where, variables)
            if (
                opening
                and head == self._opening(question, question, where, variables)[1]
                and through.startswith(opening)
            ):
                return prompt + through[len(opening) :], len(prompt), True
            raise DataError(
                f"{where}: the chat template writes the text before messages[{index}] otherwise when the assistant is "
                "to answer than when it has, so what it says there cannot be told apart; learn every token "
                "(loss_on: all), or name another template (data.chat_template)"
            )
        return through, start, False

    def _opening(
        self, messages: Sequence[Message], asked: Sequence[Message], where: str, variables: Mapping[str, Any]
    ) -> tuple[str, str]:
        """The text before an answer to messages, the beginning of its turn included, and what stands between that and
        its content; the beginning is what the generation prompt adds to the messages `asked`.

        The former is "" where the answer's text has no such beginning.
        """
        before, prompt = (self._render(asked, where, variables, prompted).text for prompted in (False, True))
        answered = [*messages, {"role": "assistant", "content": PROBE}]
        said = self._render(answered, where, variables).text.partition(PROBE)[0]
        begun, turn, head = said.rpartition(prompt.removeprefix(before) or PROBE)
        return (begun + turn, head) if turn else ("", head)

    def _turn(self, through: str, text: str) -> tuple[int, int | None]:
        """The end of the last turn in its conversation, and in one that goes on; None: that has it otherwise."""
        core, end, behind = self._core(through)
        own = len(core) + len(end) + len(behind)
        if not text.startswith(core):
            return own, None
        place = len(core)
        if end:
            found = self._end.match(text, place)
            if found is None:
                return own, None
            place = found.end()
        return own, place + (len(behind) if text.startswith(behind, place) else 0)

    def _core(self, text: str) -> tuple[str, str, str]:
        """A conversation without the end of its last turn, that end's token ("": it has none), and the space behind."""
        body = text.removesuffix(self._closing)
        said = body.rstrip()
        begin = max(0, len(said) - self._longest)
        end = next((found for found in self._end.finditer(said, begin) if found.end() == len(said)), None)
        return (body, "", "") if end is None else (said[: end.start()], end.group(), body[len(said) :])

    def _whole_tokens(self, place: int, *texts: str) -> int:
        """A place in texts that are the same up to it, moved before a special token that it divides."""
        for text in texts:
            found = self._end.finditer(text, max(0, place - self._longest), place + self._longest)
            place = next((token.start() for token in found if token.start() < place < token.end()), place)
        return place

    @functools.cached_property
    def _closing(self) -> str:
        """Text that the template writes behind the last answer's turn alone, such as Phi-3's EOS.

        Generation stops at the end of the turn, so this is not learnt.
        """
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
        last, inner = (self._behind(chat + more) for more in ([], chat[:1]))
        common = os.path.commonprefix([last, inner])
        ends = [found.end() for found in self._end.finditer(common)]
        return last[ends[-1] :] if ends and last[ends[-1] :].strip() else ""

    def _others(
        self,
        text: str,
        messages: Sequence[Message],
        learnt: Sequence[int],
        where: str,
        variables: Mapping[str, Any],
    ) -> list[tuple[int, int]]:
        """The ranges of messages of other roles than the assistant's; one for successive ones of a role in one turn."""
        found, taken, behind = [], set(learnt), 0
        for first in learnt:
            if first < behind:
                continue
            other = [*messages[:first], {**messages[first], "content": PROBE}]
            begun, probe, _ = self._render(other, where, variables).text.partition(PROBE)
            through, behind = "", first
            while behind == first or not text.startswith(through):
                behind += 1
                through = self._render(messages[:behind], where, variables).text if behind < len(messages) else text
                if behind not in taken or messages[behind]["role"] != messages[first]["role"]:
                    break
            role = messages[first]["role"]
            if not (probe and text.startswith(begun) and text.startswith(through) and len(begun) <= len(through)):
                raise DataError(
                    f"{where}: the chat template does not write messages[{first}], the {role}'s, by itself, so it "
                    "cannot be told apart; learn other tokens (loss_on: responses, or all)"
                )
            found.append((len(begun), len(through)))
        return found

    def _rewritten(
        self,
        text: str,
        messages: Sequence[Message],
        learnt: Sequence[int],
        where: str,
        variables: Mapping[str, Any],
    ) -> dict[int, RenderedChat]:
        """The learnt turns that a conversation's text has otherwise than the text that ends with them → the latter."""
        found = {}
        for index in learnt if self._rewrites else ():
            if index + 1 < len(messages):
                own = self._render(messages[: index + 1], where, variables)
                if self._turn(own.text, text)[1] is None:
                    count = sum(message["role"] == "assistant" for message in messages[: index + 1])
                    found[index] = self._marks(own, count)
        return found

    def _marks(self, chat: RenderedChat, turns: int) -> RenderedChat:
        """The same marks without what closes the conversation behind its last turn, and, of more marks than turns,
        without those that hold nothing.
        """
        own = len(chat.text.removesuffix(self._closing))
        found = [(start, min(end, own)) for start, end in chat.responses if start < own]
        if len(found) > turns:
            found = [(start, end) for start, end in found if start < end]
        return chat._replace(responses=found)

    @functools.cached_property
    def _rewrites(self) -> bool:
        """Whether a conversation with thoughts is rewritten when messages follow; few marked ones are."""
        user = {"role": "user", "content": "a"}
        thoughts = ({"content": "<think>\nb\n</think>\n\nc"}, {"content": "c", "reasoning_content": "b"})
        for said in thoughts:
            chat = [user, {"role": "assistant", **said}]
            try:
                own, whole = self.render(chat, "a probe"), self.render(chat * 2, "a probe")
            except DataError:
                return True  # it is not known
            if self._turn(own, whole)[1] is None:
                return True
        return False

    def _marked(
        self,
        chat: RenderedChat,
        messages: Sequence[Message],
        turns: Sequence[int],
        learnt: Sequence[int],
        where: str,
        variables: Mapping[str, Any],
    ) -> list[tuple[int, int]]:
        """The marked responses of the learnt turns; a turn's marks follow those of the messages before it."""
        if not learnt or len(learnt) == len(turns):
            return chat.responses if learnt else []
        runs = [(is_learnt, next(run)) for is_learnt, run in itertools.groupby(turns, learnt.__contains__)]
        before = (self._marks(self._render(messages[:at], where, variables), turns.index(at)) for _, at in runs[1:])
        starts = [0, *(len(part.responses) for part in before)]
        ends = [*starts[1:], len(chat.responses)]
        kept = [(start, end) for (is_learnt, _), start, end in zip(runs, starts, ends, strict=True) if is_learnt]
        return [response for start, end in kept for response in chat.responses[start:end]]

    def _render(
        self,
        messages: Sequence[Message],
        where: str,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = False,
    ) -> RenderedChat:
        """The text, with the template's marked responses if any."""
        try:
            tools = variables.get("tools")
            template = self._with_tools if tools else self._template
            pieces = list(
                template.generate(
                    {BUDGET: Budget(), "documents": None, **self._special_tokens, **self._options, **variables},
                    messages=[_with_reasoning(message) for message in messages],
                    tools=list(tools) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        # Templates are programs: they fail with Jinja's errors, but also with TypeError where a message has no content.
        except _FAILURES as error:
            raise DataError(f"{where}: the chat template refuses the conversation: {_reason(error)}") from error
        responses, start, length = [], 0, 0
        for piece in pieces:
            if piece is START:
                start = length
            elif piece is END:
                responses.append((start, length))
            length += len(piece)
        return RenderedChat("".join(pieces), responses, bool(responses))


def _compiled(source: str) -> jinja2.Template:
    if len(source) > SOURCE:
        raise ConfigError(f"the chat template is too long: expected {SOURCE:,} characters, got {len(source):,}")
    try:
        return compile_template(source)
    # Python compiles what Jinja makes of it, and has limits of its own.
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"the chat template is not valid Jinja: {_reason(error)}") from error


def _with_reasoning(message: Message) -> Message:
    """A message with its reasoning under both names that templates read, as transformers gives it to them."""
    reasoning = _thought(message)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _thought(message: Message) -> Any:
    return next((message[name] for name in REASONING if message.get(name) is not None), None)


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first that there is counts."""

PROBE = "\ufdd0content\ufdd1"
"""Content in another's place; the two are no characters of a text."""

_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RuntimeError, MemoryError),
)

_SHOWN = 200
"""Characters of a reason in an error, at most."""


def _reason(error: BaseException) -> str:
    """An error's reason as one short line."""
    if isinstance(error, RecursionError):
        return "something in it calls itself, or is nested too deep"
    text = " ".join(str(error).encode("utf-8", "backslashreplace").decode().split()) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
