"""Chat templates: messages to text, and where in the text the responses lie.

The template is rendered with the environment that transformers gives to templates (sandboxed Jinja with trimmed
blocks, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, the `generation` tag), built here because
importing transformers' own brings torch in wherever torch is installed.

Where a template marks responses (`{% generation %} … {% endgeneration %}`), the marks say where they lie, and one
rendering is enough. Elsewhere a response is what the template adds to the text when the assistant's message follows:
it lies between the rendering of all messages before it, with the generation prompt, and the rendering of all messages
up to it. Both must be beginnings of the whole conversation's text, and a template for which they are not is refused: a
response is never searched for.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastjax.data.records import Message
from fastjax.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class RenderedChat(NamedTuple):
    """A conversation as text.

    Attributes:
        text: What the template makes of the messages.
        responses: The range [start, end) of characters of each response to learn: what the template marks, or what an
            assistant's message adds after the generation prompt, the end of its turn included.
        marked: Whether the template marked them.
    """

    text: str
    responses: list[tuple[int, int]]
    marked: bool = False


class ChatTemplate:
    """A chat template and the special tokens that it may write."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """Compile a template.

        Args:
            source: The Jinja source.
            special_tokens: `bos_token`, `eos_token` and the like, as the template may name them.

        Raises:
            ConfigError: The source is not valid Jinja.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _compile(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error

    @classmethod
    def from_tokenizer(cls, tokenizer: "PreTrainedTokenizerFast") -> "ChatTemplate":
        """Take the template that comes with a tokenizer.

        Args:
            tokenizer: The tokenizer.

        Returns:
            Its template (the one named "default" where there are several).

        Raises:
            ConfigError: The tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template, which conversations need: "
                "name one (data.chat_template: chatml, llama3, mistral, gemma, alpaca, plain or a file), or give rows "
                "with 'text'"
            )
        return cls(tokenizer.get_chat_template(), tokenizer.special_tokens_map)

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
            where: Where they come from, for errors.
            tools: The functions that the assistant may call.
            add_generation_prompt: Whether to add what asks the assistant to answer.

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
    ) -> RenderedChat:
        """Render a conversation and find its responses.

        Args:
            messages: The messages in order.
            where: Where they come from, for errors.
            tools: The functions that the assistant may call.
            given: How many messages at the beginning are no responses, whoever says them.
            last: Whether only the last response counts.

        Returns:
            The text and the range of each response in it.

        Raises:
            DataError: The template refuses the messages, or does not keep the beginning of a conversation when
                messages follow.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= given]
        if last:
            turns = turns[-1:]
        chat = self._render(messages, where, tools)
        if chat.marked:
            if not turns:
                return chat._replace(responses=[])
            earlier = any(message["role"] == "assistant" for message in messages[: turns[0]])
            before = len(self._render(messages[: turns[0]], where, tools).responses) if earlier else 0
            return chat._replace(responses=chat.responses[before:])
        text, responses = chat.text, []
        for index in turns:
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
        return RenderedChat(text, responses)

    def _render(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = False,
    ) -> RenderedChat:
        """The text, with the responses that the template marks if it does."""
        try:
            pieces = list(
                self._template.generate(
                    messages=list(messages),
                    tools=list(tools) if tools else None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
            )
        # Templates are programs: they fail with Jinja's errors, but also with TypeError where a message has no content.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"{where}: the chat template refuses the conversation: {error}") from error
        responses, start, length = [], 0, 0
        for piece in pieces:
            if piece is _START:
                start = length
            elif piece is _END:
                responses.append((start, length))
            length += len(piece)
        return RenderedChat("".join(pieces), responses, bool(responses))


class _Mark(str):
    """An empty piece of a rendering, known by its identity. A macro melts its pieces into one, and the mark is gone:
    the places of responses made in there are not known, and are found as if they had not been marked.
    """

    def __str__(self) -> str:
        return self  # and not a plain copy


_START, _END = _Mark(), _Mark()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` puts a mark before and behind a response."""

    tags = {"generation"}
    start, end = _START, _END

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (jinja2.nodes.Output([self.attr(name, lineno=line)], lineno=line) for name in ("start", "end"))
        # What a response sets stays within it, as in transformers, which makes it a block of its own.
        return jinja2.nodes.Scope([start, *body, end], lineno=line)


_DICT = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to what templates do most: looking into messages."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without the underscored attributes by which a template could leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any):
        # No names for the positional arguments, so that a template may set an attribute called self.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` for templates: it can be called, and nothing of the class is in reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    template = environment.from_string(source)
    # Each rendering copies these, and the chain of mappings that they are is slow to copy.
    template.globals = dict(template.globals)
    return template
