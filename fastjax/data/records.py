"""Examples before encoding: a text, a conversation or token ids, and its place."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

Message = dict[str, Any]
"""One message of a conversation: `role`, `content`, and other keys for the chat template."""


class TextRecord(NamedTuple):
    """A plain text.

    Attributes:
        text: The text.
        where: File and line, or another name of its place, for messages to the user.
        prompt: Characters at its beginning that are not learnt.
    """

    text: str
    where: str
    prompt: int = 0


class ChatRecord(NamedTuple):
    """A conversation.

    Attributes:
        messages: The messages in order, none of their values None.
        where: File and line, or another name of its place, for messages to the user.
        tools: The functions that the assistant may call, as JSON schemas; None: none.
        prompt: Messages at its beginning that are not learnt.
        train: Each message's flag, None where it has none; None: no message has one.
        options: Further variables of the chat template, as `enable_thinking` or `documents`; None: none.
    """

    messages: list[Message]
    where: str
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0
    train: tuple[bool | None, ...] | None = None
    options: dict[str, Any] | None = None


class TokenRecord(NamedTuple):
    """A text as token ids.

    Attributes:
        tokens: The ids.
        learn: Whether each is learnt.
        where: File and line, or another name of its place, for messages to the user.
        completion: Whether each is part of a completion, which alone is learnt unless all is; None: unknown.
    """

    tokens: Int32[np.ndarray, " N"]
    learn: Bool[np.ndarray, " N"]
    where: str
    completion: Bool[np.ndarray, " N"] | None = None


Written = TextRecord | ChatRecord
"""An example in words."""

Record = Written | TokenRecord
"""An example before encoding."""


class PreferenceRecord(NamedTuple):
    """Answers of one prompt, or of one row of a data set.

    Attributes:
        answers: Each with its prompt, which is not learnt; of a pair the chosen one and the rejected one.
        desirable: Whether each is chosen, or marked as desirable.
        where: Their place, for messages to the user.
        margin: By how much, in a pair, the chosen answer's score should be larger.
    """

    answers: tuple[Record, ...]
    desirable: tuple[bool, ...]
    where: str
    margin: float = 0.0
