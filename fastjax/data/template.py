"""Chat templates: messages to text, and the marks of responses in it.

Templates are rendered in transformers' environment (`template_environment`), within limits of time and size
(`template_limits`). `responses` finds what of a text is learnt.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from convert.errors import shorten
from fastjax.data.records import Message
from fastjax.data.special_texts import SpecialTexts
from fastjax.data.template_environment import END, START, compile_template, variables_of
from fastjax.data.template_limits import BUDGET, SOURCE, Budget
from fastjax.data.turns import Turns
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
        left_out: Kinds of parts of the messages that no text of the conversation has (`fastjax.data.notes.left_out`).
    """

    text: str
    responses: list[tuple[int, int]]
    marked: bool = False
    others: Sequence[tuple[int, int]] = ()
    elsewhere: int = 0
    left_out: Collection[str] = ()


class ChatTemplate:
    """A chat template and its special tokens.

    Attributes:
        source: The Jinja source, that for conversations with tools included.
        options: Further variables of every conversation.
        reads: Names of the variables that it reads or sets.
    """

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
        self.source = source + (with_tools or "")
        self._special_tokens, self.options = dict(special_tokens), dict(options or {})
        self._ends, self._added = special_tokens.values() if ends is None else ends, added
        self._template = _compiled(source)
        self._with_tools = self._template if with_tools is None else _compiled(with_tools)
        self.reads = variables_of(source) | variables_of(with_tools or "")
        if unread := sorted(self.options.keys() - self.reads):
            raise ConfigError(
                f"chat_template_kwargs: expected variables that the chat template reads, got {unread[0]}, which "
                f"stands nowhere in it; {shorten(', '.join(sorted(self.reads)), 300)} do"
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
    def turns(self) -> Turns:
        """The way in which it ends turns."""
        return Turns(lambda chat: self.render(chat, "a probe").text, self._ends, self._added)

    def render(
        self,
        messages: Sequence[Message],
        where: str,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> RenderedChat:
        """Render messages as text, special tokens included, with the marked responses if there are any.

        Args:
            messages: The messages in order.
            where: Their place, for errors.
            variables: Further ones of the template in this conversation, as `tools`, the functions that the assistant
                may call, `enable_thinking` or `documents`; they stand before the template's own.
            add_generation_prompt: Add the beginning of the assistant's turn.

        Raises:
            DataError: The template refuses the messages.
        """
        variables = variables or {}
        try:
            tools = variables.get("tools")
            template = self._with_tools if tools else self._template
            pieces = list(
                template.generate(
                    {BUDGET: Budget(), "documents": None, **self._special_tokens, **self.options, **variables},
                    messages=[with_reasoning(message) for message in messages],
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


def with_reasoning(message: Message) -> Message:
    """A message with its reasoning under both names that templates read, as transformers gives it to them.

    Args:
        message: The message.
    """
    reasoning = thought_of(message)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def thought_of(message: Message) -> Any:
    """A message's reasoning under any of its names; None: it has none.

    Args:
        message: The message.
    """
    return next((message[name] for name in REASONING if message.get(name) is not None), None)


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first that there is counts."""

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
