"""A conversation so far: the system prompt, questions and answers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from fastjax.data.records import Message
from fastjax.errors import ConfigError
from fastjax.generation.replies import Reply


@dataclasses.dataclass
class Conversation:
    """A conversation.

    Attributes:
        system: the system prompt; "": none.
        turns: the user's and the assistant's messages, in turn.
    """

    system: str = ""
    turns: list[Message] = dataclasses.field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """All messages."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, question: str) -> None:
        """Add a question."""
        self.turns.append({"role": "user", "content": question})

    def answer(self, reply: Reply) -> None:
        """Add an answer to the last question."""
        message: Message = {"role": "assistant", "content": reply.content}
        self.turns.append({**message, "reasoning_content": reply.reasoning} if reply.reasoning else message)

    def take_back(self, *, question: bool = True) -> str:
        """Take back the last answer, and its question.

        Args:
            question: whether the question is taken back too.

        Returns:
            The question.

        Raises:
            ConfigError: nothing was asked.
        """
        asked = [place for place, message in enumerate(self.turns) if message["role"] == "user"]
        if not asked:
            raise ConfigError("nothing was asked yet")
        said = self.turns[asked[-1]]["content"]
        del self.turns[asked[-1] + (not question) :]
        return said

    def save(self, file: str, **more: Any) -> None:
        """Append the conversation to a file, as a row of data for training.

        Args:
            file: its name; made if need be.
            more: further fields of the row.

        Raises:
            ConfigError: nothing was said.
            OSError: it cannot be written.
        """
        if not self.turns:
            raise ConfigError("nothing was asked yet")
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"messages": self.messages, **more}, ensure_ascii=False) + "\n")
