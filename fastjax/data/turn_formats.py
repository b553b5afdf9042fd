"""Formats of turns as data, and the chat templates that write them: the texts around each role's message.

In the texts `{}` is the message, `{bos}` and `{eos}` are the tokenizer's tokens. A published format of this shape is a
row of `FORMATS`; one with functions, thoughts or other turns has a file in `assets/chat_templates`.
"""

import re
from typing import NamedTuple


class TurnFormat(NamedTuple):
    """The texts around messages.

    Attributes:
        user: of a user's message.
        assistant: of an answer; what follows it up to white space is learnt.
        system: of the system's message, which is the first; with `merged` it stands inside the first user's; None: no
            conversation has one.
        begin: before everything.
        default: the system's message of a conversation without one; None: there is none.
        merged: whether the system's message is part of the first user's.
        trim: whether white space at both ends of messages is left out.
        prompt: the generation prompt; None: what stands before an answer.
        closing: behind everything, where no answer is to follow.
        tokens: special tokens in it, which a tokenizer needs; the last ends an answer, unless its EOS does.
    """

    user: str
    assistant: str
    system: str | None
    begin: str = ""
    default: str | None = None
    merged: bool = False
    trim: bool = False
    prompt: str | None = None
    closing: str = ""
    tokens: tuple[str, ...] = ()

    def jinja(self, name: str) -> str:
        """The chat template, which marks answers.

        Args:
            name: of the format, for its errors.
        """
        before, behind = self.assistant.split("{}")
        prompt = before if self.prompt is None else self.prompt
        learnt = before.removeprefix(prompt) if before.startswith(prompt) else ""
        after = behind[len(behind.rstrip()) :]
        content = "message.content | trim" if self.trim else "message.content"
        system = self.system or ""
        values = {
            "first": "0"
            if self.system is None
            else "1 if messages and messages[0].role in ('system', 'developer') else 0",
            "name": name,
            "others": "" if self.system is None else ", and a first one of the system",
            "begin": _written(self.begin),
            "system": _written(system, content.replace("message", "messages[0]")),
            "default": "''" if self.default is None else _written(system, literal(self.default)),
            "user": _written(self.user, f"(inside + {content})" if self.merged else content),
            "inside": "inside" if self.merged else "''",
            "written": "''" if self.merged else "system",
            "before": _written(before.removesuffix(learnt)),
            "answer": " + ".join(
                [_written(learnt), f"(message.content or ''){' | trim' * self.trim}", _written(behind.rstrip())]
            ),
            "after": _written(after),
            "prompt": _written(prompt),
            "closing": _written(self.closing),
        }
        return re.sub(r"<<(\w+)>>", lambda found: values[found[1]], _TEMPLATE)


_HAS_SYSTEM = "messages and messages[0].role in ('system', 'developer')"

_TEMPLATE = """\
{%- if tools %}
    {{- raise_exception("the format <<name>> has no functions (tools)") }}
{%- endif %}
{%- set first = <<first>> %}
{%- set system = <<system>> if first else <<default>> %}
{{- <<begin>> + <<written>> }}
{%- for message in messages[first:] %}
    {%- set inside = system if loop.first else '' %}
    {%- if message.role == 'assistant' %}
        {{- <<before>> }}
        {%- generation %}
            {{- <<answer>> }}
        {%- endgeneration %}
        {{- <<after>> }}
    {%- elif message.role == 'user' %}
        {{- <<user>> }}
    {%- else %}
        {{- raise_exception("the format <<name>> has messages of user and assistant<<others>>") }}
    {%- endif %}
{%- endfor %}
{{- <<prompt>> if add_generation_prompt else <<closing>> }}
"""


def literal(text: str) -> str:
    """A text as a literal of Jinja.

    Args:
        text: any.
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _written(text: str, content: str = "") -> str:
    """A text as an expression of Jinja, with its message and tokens."""
    names = {"{}": content, "{bos}": "(bos_token or '')", "{eos}": "eos_token"}
    parts = re.split(r"(\{\}|\{bos\}|\{eos\})", text)
    return " + ".join(names.get(part) or literal(part) for part in parts if part) or "''"


def _tagged(tag: str, behind: str, *, assistant: str = "assistant", **more: object) -> TurnFormat:
    """Turns that end alike, behind a tag with the role's name, ROLE or Role."""
    roles = ("system", "user", assistant)
    system, user, assistant = (tag.replace("ROLE", role).replace("Role", role.title()) for role in roles)
    return TurnFormat(f"{user}{{}}{behind}", f"{assistant}{{}}{behind}", f"{system}{{}}{behind}", **more)  # pyright: ignore[reportArgumentType]


_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
_CURIOUS = "A chat between a curious {0} and an artificial intelligence assistant. The assistant gives helpful, "
_CURIOUS += "detailed, and polite answers to the {0}'s questions."
_IM = ("<|im_start|>", "<|im_end|>")
_TURN = ("<|turn>", "<turn|>")

#: Name → the format that its family, or the data set of that name, has published.
FORMATS: dict[str, TurnFormat] = {
    "zephyr": _tagged("<|ROLE|>\n", "{eos}\n"),
    "unsloth": TurnFormat(
        ">>> User: {}\n",
        ">>> Assistant: {}{eos}\n",
        "{}\n",
        "{bos}",
        "You are a helpful assistant to the user",
    ),
    "vicuna": TurnFormat(
        "USER: {} ", "ASSISTANT: {}{eos}", "{} ", "{bos}", _CURIOUS.format("user"), prompt="ASSISTANT:"
    ),
    "vicuna_old": TurnFormat(
        "### Human: {}\n",
        "### Assistant: {}{eos}\n",
        "{}\n",
        "{bos}",
        _CURIOUS.format("human"),
        prompt="### Assistant:",
    ),
    "llama": TurnFormat(
        "{bos}[INST] {} [/INST]", " {} {eos}", "<<SYS>>\n{}\n<</SYS>>\n\n", merged=True, trim=True, prompt=""
    ),
    "llama-3.1": TurnFormat(
        _HEADER.format("user") + "{}<|eot_id|>",
        _HEADER.format("assistant") + "{}<|eot_id|>",
        _HEADER.format("system") + "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n{}<|eot_id|>",
        "{bos}",
        "",
        trim=True,
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "phi-3": _tagged(
        "<|ROLE|>\n",
        "<|end|>\n",
        closing="{eos}",
        tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "phi-4": _tagged(
        "<|im_start|>ROLE<|im_sep|>",
        "<|im_end|>",
        tokens=(*_IM, "<|im_sep|>"),
    ),
    "lfm-2": _tagged(
        "<|im_start|>ROLE\n",
        "<|im_end|>\n",
        begin="{bos}",
        tokens=_IM,
    ),
    "starling": _tagged(
        "GPT4 Correct Role: ",
        "<|end_of_turn|>",
        begin="{bos}",
        prompt="GPT4 Correct Assistant:",
        tokens=("<|end_of_turn|>",),
    ),
    "gemma-4": _tagged(
        "<|turn>ROLE\n",
        "<turn|>\n",
        assistant="model",
        begin="{bos}",
        trim=True,
        tokens=_TURN,
    ),
    "gemma-4-thinking": _tagged(
        "<|turn>ROLE\n",
        "<turn|>\n",
        assistant="model",
        begin="{bos}",
        trim=True,
        prompt="<|turn>model\n<|channel>thought\n<channel|>",
        tokens=("<|channel>", "<channel|>", *_TURN),
    ),
}
