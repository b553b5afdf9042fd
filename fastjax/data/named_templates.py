"""Chat templates by name, for tokenizers without a suitable one.

The templates are files in `assets/chat_templates`. They mark responses, the end of the turn included, and take
system messages, tools, tool calls and results. Llama 3, Mistral and Gemma follow the published formats of these models;
system messages and tools stand at the beginning (not in the last turn), so that later messages leave a conversation's
beginning unchanged.

A template needs a tokenizer with its special tokens: otherwise they would be learnt letter by letter, and nothing would
end a turn.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from convert.errors import shorten
from fastjax.data.template import ChatTemplate
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FOLDER = Path(__file__).parent.parent / "assets" / "chat_templates"


class _Needs(NamedTuple):
    """The special tokens of a template.

    Attributes:
        tokens: Written literally.
        names: Written by the tokenizer's attribute.
    """

    tokens: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


NAMED_TEMPLATES: dict[str, _Needs] = {
    "chatml": _Needs(("<|im_start|>", "<|im_end|>")),
    "llama3": _Needs(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ("bos_token",)),
    "mistral": _Needs(
        (
            *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        ("bos_token", "eos_token"),
    ),
    "gemma": _Needs(("<start_of_turn>", "<end_of_turn>"), ("bos_token",)),
    "alpaca": _Needs(names=("eos_token",)),
    "plain": _Needs(names=("eos_token",)),
}
"""Name → the special tokens of its template."""


def set_chat_template(tokenizer: "PreTrainedTokenizerFast", chat_template: str) -> "PreTrainedTokenizerFast":
    """Set a tokenizer's chat template, which is saved with it.

    Args:
        tokenizer: The tokenizer; changed in place.
        chat_template: One of `NAMED_TEMPLATES`, or a file with a Jinja template.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: An unknown name, a file that is not a template, or special tokens that the tokenizer lacks.
    """
    if chat_template not in NAMED_TEMPLATES:
        tokenizer.chat_template = _read(chat_template)
        return tokenizer
    needs = NAMED_TEMPLATES[chat_template]
    backend = tokenizer.backend_tokenizer
    lacking = [token for token in needs.tokens if backend.token_to_id(token) is None]
    lacking += [f"{kind} (none is set)" for kind in needs.names if getattr(tokenizer, kind) is None]
    if lacking:
        raise ConfigError(
            f"data.chat_template: {chat_template} needs special tokens that the tokenizer in {tokenizer.name_or_path} "
            f"lacks: {', '.join(lacking)}; add them (model.new_tokens), or choose a template without, such as plain"
        )
    tokenizer.chat_template = (_FOLDER / f"{chat_template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def _read(name: str) -> str:
    if not Path(name).is_file():
        raise ConfigError(
            f"data.chat_template: expected one of {', '.join(NAMED_TEMPLATES)}, or a file with a Jinja template, "
            f"got {shorten(name)}, which is neither"
        )
    try:
        source = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.chat_template: {name} is not valid UTF-8 at byte {error.start}") from error
    ChatTemplate(source, {})
    return source
