"""A conversation that ends amid the assistant's answer, or amid its reasoning, as the beginning of that answer.

A mark behind the last message's text tells where the template has written it; what the template writes behind is cut.
Transformers' `continue_final_message` does the same.
"""

from collections.abc import Sequence

from convert.errors import shown
from fastjax.data.records import Message
from fastjax.data.template import REASONING
from fastjax.errors import ConfigError, DataError

_MARK = "\ufffe"  # a noncharacter, which no text holds


def marked(messages: Sequence[Message], where: str) -> list[Message]:
    """The messages with a mark behind the text that is to be continued.

    Args:
        messages: a conversation; the last message is the assistant's. If it has no content, its reasoning is continued.
        where: its name in errors.

    Raises:
        ConfigError: another last message, or one without text.
    """
    *before, last = messages
    place = f"{where}: messages[{len(before)}]"
    if last.get("role") != "assistant":
        raise ConfigError(
            f"{place}: continue_final_message expects the assistant's message at the end, got one of role "
            f"{shown(last.get('role'), 60)}; leave the setting at False for a new answer"
        )
    name = next((name for name in ("content", *REASONING) if last.get(name)), None)
    if name is None or not isinstance(last[name], str) or last.get("tool_calls"):
        raise ConfigError(f"{place}: continue_final_message expects a message of text, got {shown(last, 100)}")
    return [*before, {**last, name: last[name] + _MARK}]


def cut(text: str, where: str) -> str:
    """A rendered conversation up to the mark.

    Args:
        text: the template's text of `marked` messages.
        where: its name in errors.

    Raises:
        DataError: the template has not written the message, or more than once.
    """
    beginning, *others = text.split(_MARK)
    if len(others) != 1:
        raise DataError(
            f"{where}: continue_final_message: expected a chat template that writes the last message once, got "
            f"{len(others)} times; leave the setting at False for a new answer"
        )
    return beginning
