"""The texts by which a chat template begins an instruction and a response, for rows of text that it has rendered."""

from typing import TYPE_CHECKING

from fastjax.data.records import Message
from fastjax.data.settings import PARTS
from fastjax.data.template import ChatTemplate
from fastjax.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SAID = ("first question", "first answer", "second question", "second answer")


def template_parts(tokenizer: "PreTrainedTokenizerFast") -> tuple[str, str]:
    """The instruction part and the response part of a tokenizer's chat template.

    Between a question and its answer stand the end of the user's turn and the response part; between an answer and the
    next question the end of the assistant's and the instruction part.

    Args:
        tokenizer: with a chat template.

    Returns:
        Both parts, neither of them empty.

    Raises:
        ConfigError: no chat template, or one whose parts cannot be told.
    """
    expected = f"{' and '.join(PARTS)}: expected the texts that begin an instruction and a response in rows of text"
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{expected}, got none, and the tokenizer has no chat template; give them, or get_chat_template"
        )
    turns = [{"role": ("user", "assistant")[n % 2], "content": said} for n, said in enumerate(_SAID)]
    template = ChatTemplate.from_tokenizer(tokenizer)
    try:
        text = template.render(turns, "chat_template").text
        parts = [_between(template, turns, count, text) for count in (2, 1)]
    except DataError as error:
        raise ConfigError(f"{expected}, got none, and the chat template does not tell: {error}") from error
    if not all(part.strip() for part in parts):
        raise ConfigError(f"{expected}, got none, and the chat template writes nothing between turns; give them")
    return parts[0], parts[1]


def _between(template: ChatTemplate, turns: list[Message], count: int, text: str) -> str:
    """The text between turn `count` and what the next one says, without the end of that turn where it has one."""
    before, behind = _SAID[count - 1 : count + 1]
    whole = text.partition(before)[2].partition(behind)[0]
    through = template.render(turns[:count], "chat_template").text
    end = template.turns.last(through, text)[1]
    if end is None:  # the last answer has its beginning otherwise, as where a thought is written of it alone
        part = whole.removeprefix(through.partition(before)[2])
    else:
        part = text[end:].partition(behind)[0]
    return part if part.strip() else whole
