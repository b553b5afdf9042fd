"""An example as it was read: a text or a conversation, and where it came from."""

from typing import Any, NamedTuple

Message = dict[str, Any]
"""One message of a conversation: `role`, `content`, and whatever else the chat template reads."""


class TextRecord(NamedTuple):
    """A plain text.

    Attributes:
        text: The text.
        where: Where it came from, such as file and line, for messages to the user.
        prompt: How many characters at its beginning are given and not learnt.
    """

    text: str
    where: str
    prompt: int = 0


class ChatRecord(NamedTuple):
    """A conversation.

    Attributes:
        messages: The messages in order, none of their values None.
        where: Where it came from, such as file and line, for messages to the user.
        tools: The functions that the assistant may call, as JSON schemas; None: none.
        prompt: How many messages at its beginning are given; responses among them are not learnt.
        train: Whether each message is to be learnt, None where the row does not say; None: it says nothing.
    """

    messages: list[Message]
    where: str
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0
    train: tuple[bool | None, ...] | None = None


Record = TextRecord | ChatRecord
"""An example as it was read."""
