"""`apply_chat_template`: a chat template from an example of its text, with {INPUT}, {OUTPUT} and perhaps {SYSTEM}."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convert.errors import shorten
from fastjax.data.columns import parse_messages
from fastjax.data.modelfile import modelfile
from fastjax.data.sharegpt import Rows, mapped
from fastjax.data.turn_formats import TurnFormat
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DEFAULT = (
    "Below are some instructions that describe some tasks. Write responses that appropriately complete each request."
)


def apply_chat_template(
    dataset: Rows,
    tokenizer: "PreTrainedTokenizerFast",
    chat_template: str,
    default_system_message: str | None = _DEFAULT,
    extra_eos_tokens: str | Sequence[str] | None = None,
) -> Any:
    """Give a tokenizer the chat template that an example shows, and rows of conversations their text by it.

    Args:
        dataset: Rows with `conversations`, of the `datasets` library or a list.
        tokenizer: Its chat template is replaced; it gets Ollama's Modelfile as `_ollama_modelfile`.
        chat_template: A question and its answer as {INPUT} and {OUTPUT} with all that stands around them, once or
            twice; {SYSTEM} before them is the system's message, and without it that takes the place of the text before
            the first question. An answer that ends with no end token gets the EOS.
        default_system_message: In the place of {SYSTEM} where a conversation has no system's message.
        extra_eos_tokens: Tokens besides the EOS that end an answer.

    Returns:
        The data set with a column `text`.

    Raises:
        ConfigError: A text that is no such example, or a tokenizer without an EOS.
        DataError: A conversation that the template cannot write.
    """
    found = format_of(chat_template, tokenizer, default_system_message, extra_eos_tokens)
    tokenizer.chat_template = found.jinja("chat_template")
    vars(tokenizer)["_ollama_modelfile"] = modelfile("{__FILE_LOCATION__}", tokenizer)

    def text_of(row: Mapping[str, Any]) -> dict[str, Any]:
        messages = parse_messages(row.get("conversations"), "conversations")
        return {"text": tokenizer.apply_chat_template(messages, tokenize=False)}

    return mapped(dataset, text_of)


def format_of(
    example: str,
    tokenizer: "PreTrainedTokenizerFast",
    default_system_message: str | None = _DEFAULT,
    extra_eos_tokens: str | Sequence[str] | None = None,
) -> TurnFormat:
    """Take an example of a chat template's text apart.

    Args:
        example: As of `apply_chat_template`.
        tokenizer: Whose BOS begins the text, if it adds one.
        default_system_message: As of `apply_chat_template`.
        extra_eos_tokens: As of `apply_chat_template`.

    Raises:
        ConfigError: As of `apply_chat_template`.
    """
    if tokenizer.eos_token is None:
        raise ConfigError(f"the tokenizer in {tokenizer.name_or_path} has no eos_token, so no answer can end")
    parts = _divided(example.lstrip()) or _divided(example.strip())
    if parts is None:
        raise ConfigError(
            "chat_template: expected {INPUT} and {OUTPUT}, once or twice in this order and with equal texts around "
            f"them, and at most one {{SYSTEM}} before them, got {shorten(repr(example), 300)}"
        )
    system, user, assistant = parts
    extra = [extra_eos_tokens] if isinstance(extra_eos_tokens, str) else list(extra_eos_tokens or ())
    if unknown := [token for token in extra if tokenizer.backend_tokenizer.token_to_id(token) is None]:
        raise ConfigError(f"extra_eos_tokens: expected tokens of the tokenizer, got {shorten(', '.join(unknown), 200)}")
    if not any(assistant.partition("{}")[2].startswith(end) for end in (str(tokenizer.eos_token), *extra)):
        assistant += "{eos}"
    bos = str(tokenizer.bos_token or "")
    begins = bool(bos) and (system.startswith(bos) or tokenizer("A")["input_ids"][:1] == [tokenizer.bos_token_id])
    system = system.removeprefix(bos)
    begin = "{bos}" if begins else ""
    if "{SYSTEM}" not in system:  # a system's message stands in the place of what is said before the turns
        return TurnFormat(user, assistant, "{}" if system else None, begin, system or None)
    return TurnFormat(user, assistant, system.replace("{SYSTEM}", "{}"), begin, default_system_message)


def _divided(example: str) -> tuple[str, str, str] | None:
    """The text before the turns, a question's turn and an answer's, with {} for messages; None: it is no example."""
    pairs = example.count("{INPUT}")
    if (
        pairs not in (1, 2)
        or example.count("{OUTPUT}") != pairs
        or any(mark in example for mark in ("{}", "{bos}", "{eos}"))
    ):
        return None
    begin, _, rest = example.partition("{INPUT}")
    between, _, behind = rest.partition("{OUTPUT}")
    if pairs == 2:
        tail, _, rest = behind.partition("{INPUT}")
        again, _, behind = rest.partition("{OUTPUT}")
        asks = tail.removeprefix(behind)
        if again != between or not tail.startswith(behind) or not begin.endswith(asks):
            return None
    else:
        asks = begin
    asked = behind if behind and between.startswith(behind) else ""
    before = between.removeprefix(asked)
    if pairs == 1:  # a question begins as an answer does
        lengths = [count for count in range(1, len(before) + 1) if before[:count] in begin]
        asks = begin[begin.rfind(before[: lengths[-1]]) :] if lengths else asks
    system = begin.removesuffix(asks)
    if "{SYSTEM}" in asks + between + behind or system.count("{SYSTEM}") > 1 or not before:
        return None
    return system, f"{asks}{{}}{asked}", f"{before}{{}}{behind}"
