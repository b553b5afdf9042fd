"""`get_chat_template`: Unsloth's way to give a tokenizer a chat template."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convert.errors import shown
from fastjax.data.named_templates import set_chat_template
from fastjax.data.template import ChatTemplate
from fastjax.data.turn_formats import literal
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MEANINGS = ("role", "content", "user", "assistant")

_MAPPED = """\
{%- set mapped = namespace(messages=[]) %}
{%- for message in messages %}
    {%- if ROLE in message %}
        {%- set message = {'role': ROLES.get(message[ROLE], message[ROLE]), 'content': message[CONTENT]} %}
    {%- endif %}
    {%- set mapped.messages = mapped.messages + [message] %}
{%- endfor %}
{%- set messages = mapped.messages %}
"""
_SYSTEM = """\
{%- if not messages or messages[0].role not in ('system', 'developer') %}
    {%- set messages = [{'role': 'system', 'content': TEXT}] + messages %}
{%- endif %}
"""


def get_chat_template(
    tokenizer: "PreTrainedTokenizerFast",
    chat_template: str | Sequence[str] = "chatml",
    mapping: Mapping[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
    **others: Any,
) -> "PreTrainedTokenizerFast":
    """Set a tokenizer's chat template, which is saved with it.

    Args:
        tokenizer: The tokenizer; changed in place.
        chat_template: A name of `named_templates`, of which those of a family keep the tokenizer's own if it is that
            family's; a file with a Jinja template; or a pair of a template's text and the token that ends a turn in it
            ("eos_token": the EOS).
        mapping: The names that messages have: "role" and "content" are keys, "user" and "assistant" roles, as
            {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}. Messages with a role and a
            content are read besides. None: those alone.
        map_eos_token: Where the tokenizer lacks the token that ends a turn, its EOS does; false: that is refused.
        system_message: The system's message of conversations without one; None: the template's, if it has one.
        others: Unsloth's further keywords, which change nothing here.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: An unknown name, what is no template, or special tokens that the tokenizer lacks.
    """
    if unknown := sorted(others.keys() - {"patch_saving", "use_zoo_tokenizer_patch"}):
        raise ConfigError(f"get_chat_template: {unknown[0]}: unknown; expected chat_template, mapping, map_eos_token")
    begin = _mapped(mapping) if mapping else ""
    if system_message is not None:
        begin += _SYSTEM.replace("TEXT", literal(system_message))
    if isinstance(chat_template, str):
        set_chat_template(tokenizer, chat_template, eos_ends_turns=map_eos_token)
    else:
        tokenizer.chat_template = _given(tokenizer, chat_template)
    if begin and isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = begin + tokenizer.chat_template
    return tokenizer


def _mapped(mapping: Mapping[str, str]) -> str:
    """A template's beginning that reads messages with other names."""
    if set(mapping) != set(_MEANINGS) or not all(isinstance(name, str) for name in mapping.values()):
        raise ConfigError(
            f"mapping: expected a name for each of {', '.join(_MEANINGS)}, got {shown(dict(mapping), 200)}"
        )
    if all(meaning == name for meaning, name in mapping.items()):
        return ""
    roles = ", ".join(f"{literal(mapping[role])}: {literal(role)}" for role in ("user", "assistant"))
    text = _MAPPED.replace("ROLES", f"{{{roles}}}").replace("ROLE", literal(mapping["role"]))
    return text.replace("CONTENT", literal(mapping["content"]))


def _given(tokenizer: "PreTrainedTokenizerFast", pair: Sequence[str]) -> str:
    """The template of a pair, once its end is a token."""
    if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
        raise ConfigError(
            f"chat_template: expected a name, or a template's text and the end of a turn in it, got {shown(pair, 80)}"
        )
    source, end = pair
    ChatTemplate(source, {})
    if end != "eos_token" and tokenizer.backend_tokenizer.token_to_id(end) is None:
        raise ConfigError(
            f"chat_template: expected a token of the tokenizer as the end of a turn, got {shown(end, 60)}; add it "
            "(new_tokens of from_pretrained), or write eos_token"
        )
    return source
