"""Chat templates by name, for tokenizers without a suitable one.

Templates with functions (tools) are files in `assets/chat_templates`; those that only set turns apart are rows of
`turn_formats`. They mark responses, the end of the turn included; Qwen's, which writes earlier turns without their
thoughts, does not. Llama 3, Mistral and Gemma follow the published formats of these models; system messages and tools
stand at the beginning (not in the last turn), so that later messages leave a conversation's beginning unchanged.

A template needs a tokenizer with its special tokens: otherwise they would be learnt letter by letter, and nothing would
end a turn.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from convert.errors import shorten
from fastjax.data.template import ChatTemplate
from fastjax.data.turn_formats import FORMATS
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FOLDER = Path(__file__).parent.parent / "assets" / "chat_templates"


class NamedTemplate(NamedTuple):
    """A template with a name.

    Attributes:
        tokens: special tokens that are written literally.
        names: special tokens that are written by the tokenizer's attribute.
        end: the token of `tokens` that ends an answer; "": the EOS does.
        file: of the template; None: a row of `turn_formats`, or with `own` no text of ours.
        begin: written before the file's text: its variables.
        own: texts that stand in the template that the name's family ships, which is kept where the tokenizer has it.
        foreign: texts that stand in templates of other models with the same tokens.
    """

    tokens: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    end: str = ""
    file: str | None = None
    begin: str = ""
    own: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def source(self, name: str) -> str | None:
        """The template's text; None: there is none of ours.

        Args:
            name: its name.
        """
        if self.file is not None:
            return self.begin + (_FOLDER / f"{self.file}.jinja").read_text(encoding="utf-8")
        return FORMATS[name].jinja(name) if name in FORMATS else None

    def is_own(self, source: Any) -> bool:
        """Whether a template is the family's own.

        Args:
            source: a tokenizer's template.
        """
        if not self.own or not isinstance(source, str):
            return False
        return all(text in source for text in self.own) and not any(text in source for text in self.foreign)


def _format(name: str, *own: str) -> NamedTemplate:
    row = FORMATS[name]
    by_eos = "{eos}" in row.assistant
    return NamedTemplate(row.tokens, ("eos_token",) * by_eos, "" if by_eos else row.tokens[-1], own=own)


def _qwen(thinks: str, *own: str, foreign: tuple[str, ...] = (), default: str = "''") -> NamedTemplate:
    begin = f"{{%- set thinks = {thinks} %}}\n{{%- set default = {default} %}}\n"
    return _CHATML._replace(file="qwen", begin=begin, own=own, foreign=foreign)


_CHATML = NamedTemplate(("<|im_start|>", "<|im_end|>"), (), "<|im_end|>", "chatml")
_LLAMA = NamedTemplate(
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ("bos_token",), "<|eot_id|>", "llama3"
)
_GEMMA = NamedTemplate(("<start_of_turn>", "<end_of_turn>"), ("bos_token",), "<end_of_turn>", "gemma")

NAMED_TEMPLATES: dict[str, NamedTemplate] = {
    "chatml": _CHATML,
    "llama3": _LLAMA,
    "mistral": NamedTemplate(
        (
            *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        ("bos_token", "eos_token"),
        file="mistral",
    ),
    "gemma": _GEMMA,
    "alpaca": NamedTemplate((), ("eos_token",), file="alpaca"),
    "plain": NamedTemplate((), ("eos_token",), file="plain"),
    **{name: _format(name) for name in ("zephyr", "unsloth", "vicuna", "vicuna_old", "llama")},
    "llama-3": _LLAMA._replace(own=("<|start_header_id|>",), foreign=("Cutting Knowledge",)),
    "llama-3.1": _format("llama-3.1", "<|start_header_id|>", "Cutting Knowledge"),
    "gemma-3": _GEMMA._replace(own=("<start_of_turn>",), foreign=("not supported",)),
    "gemma-4": _format("gemma-4", "<|turn>"),
    "gemma-4-thinking": _format("gemma-4-thinking", "<|turn>", "<|channel>thought\\n<channel|>"),
    "qwen-2.5": _qwen(
        "none", "You are Qwen", default="'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'"
    ),
    "qwen3": _qwen("'optional'", "</think>", "enable_thinking"),
    "qwen3-instruct": _qwen(
        "none", "<|im_start|>", "<tool_call>", foreign=("enable_thinking", "<think>\\n'", "You are Qwen")
    ),
    "qwen3-thinking": _qwen("'always'", "</think>", foreign=("enable_thinking",)),
    "phi-3": _format("phi-3", "<|user|>", "<|end|>"),
    "phi-4": _format("phi-4", "<|im_sep|>"),
    "lfm-2": _format("lfm-2", "<|tool_list_start|>"),
    "starling": _format("starling", "GPT4 Correct"),
    "gpt-oss": NamedTemplate(own=("<|channel|>",)),
}
"""Name → its template. Those that have `own` leave a tokenizer its family's template."""

SAME_TEMPLATES: Mapping[str, str] = {
    **{name: "llama-3.1" for name in ("llama-31", "llama-3.2", "llama-3.3", "llama-32", "llama-33")},
    **{name: "gemma" for name in ("gemma2", "gemma-2")},
    **{name: "gemma-3" for name in ("gemma3", "gemma-3n", "gemma3n")},
    **{name: "qwen-2.5" for name in ("qwen-25", "qwen25", "qwen2.5")},
    **{name: "phi-3" for name in ("phi-35", "phi-3.5")},
    **{name: "chatml" for name in ("yi-chat", "gemma_chatml", "gemma2_chatml")},
    **{"gemma4": "gemma-4", "gemma4-thinking": "gemma-4-thinking", "qwen-3": "qwen3", "gptoss": "gpt-oss"},
    **{"vicuna old": "vicuna_old", "lfm-2.5": "lfm-2"},
}
"""Other names of Unsloth's → ours."""


def set_chat_template(
    tokenizer: "PreTrainedTokenizerFast", chat_template: str, *, eos_ends_turns: bool = False
) -> "PreTrainedTokenizerFast":
    """Set a tokenizer's chat template, which is saved with it.

    Args:
        tokenizer: The tokenizer; changed in place.
        chat_template: One of `NAMED_TEMPLATES` or `SAME_TEMPLATES`, or a file with a Jinja template.
        eos_ends_turns: Where the tokenizer lacks the template's special tokens, let its EOS end turns and write the
            others as ordinary text, with a note, instead of refusing.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: An unknown name, a file that is not a template, or special tokens that the tokenizer lacks.
    """
    name = SAME_TEMPLATES.get(chat_template, chat_template)
    if name not in NAMED_TEMPLATES:
        tokenizer.chat_template = _read(chat_template)
        return tokenizer
    named = NAMED_TEMPLATES[name]
    if named.is_own(tokenizer.chat_template):
        print(f"note: chat_template: the tokenizer's own is that of {chat_template}, and stays", file=sys.stderr)
        return tokenizer
    source = named.source(name)
    if source is None:
        raise ConfigError(
            f"data.chat_template: {chat_template}: expected a tokenizer with the template of its family, which there "
            f"is no other text of; {tokenizer.name_or_path} has none or another one"
        )
    tokenizer.chat_template = _fitting(source, named, tokenizer, chat_template, eos_ends_turns)
    return tokenizer


def _fitting(
    source: str, named: NamedTemplate, tokenizer: "PreTrainedTokenizerFast", name: str, eos_ends_turns: bool
) -> str:
    """A template's text for a tokenizer, which may lack its tokens."""
    backend = tokenizer.backend_tokenizer
    lacking = [token for token in named.tokens if backend.token_to_id(token) is None]
    unset = [f"{kind} (none is set)" for kind in named.names if getattr(tokenizer, kind) is None]
    if eos_ends_turns and tokenizer.eos_token is not None:
        if lacking:
            ends = f"its EOS {tokenizer.eos_token} ends turns, and " if named.end in lacking else ""
            print(
                f"note: chat_template: {name}: the tokenizer lacks {', '.join(lacking)}: {ends}what else there is of "
                "these is ordinary text",
                file=sys.stderr,
            )
            source = source.replace(named.end, "' + eos_token + '") if named.end in lacking else source
        return source
    if lacking or unset:
        raise ConfigError(
            f"data.chat_template: {name} needs special tokens that the tokenizer in {tokenizer.name_or_path} "
            f"lacks: {', '.join([*lacking, *unset])}; add them (model.new_tokens), or choose a template without, such "
            "as plain"
        )
    return source


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
