"""Chat templates: messages to text and the ranges of the responses in it.

Templates are rendered in transformers' environment (`template_environment`), within limits of time and size
(`template_limits`).

If a template marks responses (`{% generation %} … {% endgeneration %}`), the marks are their ranges, and one rendering
is enough. Otherwise a response is the text added by the assistant's message: it lies between the rendering of all
messages before it, with the generation prompt, and the rendering of all messages up to it. Both must be prefixes of the
whole conversation's text, or the template is refused: a response is never searched for.

A message of another role begins where its content does, which a rendering with other content in its place shows, and
ends with its turn; the results of several tools in one turn are one range.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from fastjax.data.records import Message
from fastjax.data.template_environment import END, START, compile_template
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
    """

    text: str
    responses: list[tuple[int, int]]
    marked: bool = False
    others: Sequence[tuple[int, int]] = ()


class ChatTemplate:
    """A chat template and its special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], with_tools: str | None = None):
        """Compile a template.

        Args:
            source: The Jinja source.
            special_tokens: The template's variables `bos_token`, `eos_token` and the like.
            with_tools: The source for conversations with tools; None: the same.

        Raises:
            ConfigError: The source is not valid Jinja, or too long.
        """
        self._special_tokens = dict(special_tokens)
        self._template = _compiled(source)
        self._with_tools = self._template if with_tools is None else _compiled(with_tools)

    @classmethod
    def from_tokenizer(cls, tokenizer: "PreTrainedTokenizerFast") -> "ChatTemplate":
        """A tokenizer's template.

        Args:
            tokenizer: The tokenizer.

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
        sources = tokenizer.chat_template
        if isinstance(sources, str):
            return cls(sources, tokenizer.special_tokens_map)
        if "default" not in sources:
            raise ConfigError(
                f"the tokenizer in {tokenizer.name_or_path} has chat templates named {', '.join(sorted(sources))}: "
                "expected one named default; give the one to use as a file (data.chat_template)"
            )
        return cls(sources["default"], tokenizer.special_tokens_map, sources.get("tool_use"))

    def render(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render messages as text.

        Args:
            messages: The messages in order.
            where: Their place, for errors.
            tools: The functions that the assistant may call.
            add_generation_prompt: Add the beginning of the assistant's turn.

        Returns:
            The text, special tokens included.

        Raises:
            DataError: The template refuses the messages.
        """
        return self._render(messages, where, tools, add_generation_prompt).text

    def render_with_responses(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        given: int = 0,
        last: bool = False,
        train: Sequence[bool | None] | None = None,
        roles: Sequence[str] = ("assistant",),
    ) -> RenderedChat:
        """Render a conversation and find what of it is learnt.

        Args:
            messages: The messages in order.
            where: Their place, for errors.
            tools: The functions that the assistant may call.
            given: Messages at the beginning that are not learnt.
            last: Only the last response counts.
            train: Each message's flag; False: it is not learnt.
            roles: Whose messages are learnt.

        Returns:
            The text, and the ranges in it of the responses and of the other messages.

        Raises:
            DataError: The template refuses the messages, or does not keep the beginning of a conversation when
                messages follow.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in range(given, len(messages)) if not (train and train[i] is False)]
        learnt = [i for i in turns[-1 if last else 0 :] if i in wanted and "assistant" in roles]
        chat = self._render(messages, where, tools)
        others = [i for i in wanted if i not in turns and messages[i]["role"] in roles]
        chat = chat._replace(others=self._others(chat.text, messages, others, where, tools))
        if chat.marked:
            return chat._replace(responses=self._marked(chat, messages, turns, learnt, where, tools))
        text, responses = chat.text, []
        for index in learnt:
            before = self.render(messages[:index], where, tools=tools, add_generation_prompt=True)
            end = index + 1
            through = self.render(messages[:end], where, tools=tools) if end < len(messages) else text
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    f"{where}: the chat template changes the text up to messages[{index}] when messages follow, "
                    "so what the assistant says there cannot be told apart; end the conversation at its first "
                    "response, or learn other tokens (loss_on: last_response, or all)"
                )
            responses.append((len(before), len(through)))
        return chat._replace(responses=responses)

    def _others(
        self,
        text: str,
        messages: Sequence[Message],
        learnt: Sequence[int],
        where: str,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[tuple[int, int]]:
        """The ranges of messages of other roles than the assistant's; one for successive ones of a role."""
        found, taken = [], set(learnt)
        for first in learnt:
            role = messages[first]["role"]
            if first - 1 in taken and messages[first - 1]["role"] == role:
                continue
            behind = first + 1
            while behind in taken and messages[behind]["role"] == role:
                behind += 1
            other = [*messages[:first], {**messages[first], "content": PROBE}]
            begun, probe, _ = self.render(other, where, tools=tools).partition(PROBE)
            through = self.render(messages[:behind], where, tools=tools) if behind < len(messages) else text
            if not (probe and text.startswith(begun) and text.startswith(through) and len(begun) <= len(through)):
                raise DataError(
                    f"{where}: the chat template does not write messages[{first}], the {role}'s, by itself, so it "
                    "cannot be told apart; learn other tokens (loss_on: responses, or all)"
                )
            found.append((len(begun), len(through)))
        return found

    def _marked(
        self,
        chat: RenderedChat,
        messages: Sequence[Message],
        turns: Sequence[int],
        learnt: Sequence[int],
        where: str,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[tuple[int, int]]:
        """The marked responses of the learnt turns; a turn's marks follow those of the messages before it."""
        if not learnt or len(learnt) == len(turns):
            return chat.responses if learnt else []
        runs = [(is_learnt, next(run)) for is_learnt, run in itertools.groupby(turns, learnt.__contains__)]
        starts = [0, *(len(self._render(messages[:index], where, tools).responses) for _, index in runs[1:])]
        ends = [*starts[1:], len(chat.responses)]
        kept = [(start, end) for (is_learnt, _), start, end in zip(runs, starts, ends, strict=True) if is_learnt]
        return [response for start, end in kept for response in chat.responses[start:end]]

    def _render(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = False,
    ) -> RenderedChat:
        """The text, with the template's marked responses if any."""
        try:
            template = self._with_tools if tools else self._template
            pieces = list(
                template.generate(
                    {BUDGET: Budget()},
                    messages=[_with_reasoning(message) for message in messages],
                    tools=list(tools) if tools else None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
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
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


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
