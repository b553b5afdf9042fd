"""Parts of a reply: what an assistant's message has beside its role."""

import dataclasses
import secrets
import string
from typing import Literal, NamedTuple

_ID = string.ascii_letters + string.digits


class Delta(NamedTuple):
    """New text of a reply.

    Attributes:
        kind: where it belongs.
        text: the text; of a call a piece of its arguments in JSON.
        index: number of the call in the reply; None: of no call.
        id: the call's own, in the first delta of it alone.
        name: the function's, in the first delta of the call alone.
    """

    kind: Literal["reasoning", "content", "tool_call"]
    text: str
    index: int | None = None
    id: str | None = None
    name: str | None = None


class ToolCall(NamedTuple):
    """A call of a function.

    Attributes:
        id: nine letters and digits, as some chat templates demand.
        name: the function's.
        arguments: a JSON object as text.
    """

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Reply:
    """A whole reply.

    Attributes:
        reasoning: the thought; "": none.
        content: the answer.
        tool_calls: those that are complete.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def new_id() -> str:
    """An id of a call."""
    return "".join(secrets.choice(_ID) for _ in range(9))
