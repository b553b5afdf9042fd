"""A Modelfile for Ollama beside a GGUF file, with the model's chat template where Go's templates can say it.

Ollama (template/template.go) renders no Jinja. It takes the `TEMPLATE` of a Modelfile, a Go template; without one that
of its own which differs from the file's chat template by fewer than 100 characters, and without any the question alone.
So the turns of the Jinja template are taken apart by rendering it, written as a Go template, and compared with what the
Jinja template writes for conversations of every shape.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from convert.files import atomic_file
from convert.generation_config import generation_settings
from fastjax.data.encoding import Encoder
from fastjax.data.records import Message
from fastjax.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from fastjax.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TEXTS = {"system": "systemprobe", "user": "userprobe", "assistant": "answerprobe"}
_SHAPES = ("u", "su", "uau", "suau", "uauau", "suauau")
_ROLES = {"s": "system", "u": "user", "a": "assistant"}
#: Contents of the comparison, beside plain ones: where templates read the content.
_SPACED, _THOUGHT = " \n a b\n ", "<think>\na\n</think>\n\nb"
#: Settings of generation_config.json that Modelfiles have by the same name.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


class Turns(NamedTuple):
    """The texts around messages.

    Attributes:
        unasked: before the first question where there is no system prompt, without a BOS that the tokenizer adds.
        around: of each role the texts before and behind a message.
        answer: the beginning of an answer.
    """

    unasked: str
    around: dict[str, tuple[str, str]]
    answer: str

    def text(self, messages: list[Message]) -> str:
        """A conversation's text, up to an answer."""
        parts = ["" if messages[0]["role"] == "system" else self.unasked]
        for message in messages:
            before, behind = self.around[message["role"]]
            parts += [before, message["content"], behind]
        return "".join([*parts, self.answer])

    def go_template(self) -> str:
        """The Go template of it."""
        parts = [f"{{{{ if not .System }}}}{_literal(self.unasked)}{{{{ end }}}}"] if self.unasked else []
        parts.append("{{ range .Messages }}")
        for place, (role, (before, behind)) in enumerate(self.around.items()):
            word = "else if" if place else "if"
            parts.append(f'{{{{ {word} eq .Role "{role}" }}}}{_literal(before)}{{{{ .Content }}}}{_literal(behind)}')
        return "".join([*parts, "{{ end }}{{ end }}", _literal(self.answer)])


def write_modelfile(
    gguf: str | os.PathLike[str], folder: str | os.PathLike[str], *, force: bool = False
) -> Path | None:
    """Write a Modelfile beside a GGUF file, named as it.

    Args:
        gguf: the file.
        folder: the model folder that it was made from.
        force: replace one that is there.

    Returns:
        The Modelfile; None: there is one, which stays.

    Raises:
        ConfigError: a tokenizer that cannot be read.
        OSError: it cannot be written.
    """
    gguf = Path(gguf)
    file = gguf.with_suffix(".Modelfile")
    if file.exists() and not force:
        return None
    folder = Path(folder)
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(folder) if has_tokenizer else None
    with atomic_file(file) as stream:
        stream.write(modelfile(f"./{gguf.name}", tokenizer, generation_settings(folder)).encode())
    return file


def modelfile(
    source: str, tokenizer: "PreTrainedTokenizerFast | None", settings: Mapping[str, Any] | None = None
) -> str:
    """The text of a Modelfile.

    Args:
        source: Of the model: the file's path.
        tokenizer: With its chat template, or None.
        settings: Of generation, as in generation_config.json.
    """
    settings, name = settings or {}, source.removeprefix("./")
    encoder = Encoder(tokenizer) if tokenizer is not None and tokenizer.eos_token_id is not None else None
    lines = [f"# ollama create NAME -f {Path(name).with_suffix('.Modelfile')}", f"FROM {source}"]
    turns, why = (None, "the model has no chat template") if encoder is None else find_turns(encoder)
    if why:
        lines += [f"# {line}" for line in why.split("\n")]
    if turns is None:
        lines.append(
            "# Without TEMPLATE, Ollama takes one of its own if that differs by fewer than 100 characters from"
        )
        lines.append("# the chat template in the file, and otherwise gives the model the question without any turns.")
        lines.append(f"# llama.cpp renders the model's own: llama-server -m {name} --jinja")
    else:
        lines.append(f'TEMPLATE """{turns.go_template()}"""')
    if encoder is not None and tokenizer is not None and tokenizer.chat_template:
        ends = tokenizer.convert_ids_to_tokens(list(encoder.stop_tokens()))
        lines += [f'PARAMETER stop "{end}"' for end in ends if '"' not in end]
    lines += [f"PARAMETER {name} {settings[name]}" for name in _SAMPLING if settings.get(name) is not None]
    return "\n".join(lines) + "\n"


def find_turns(encoder: Encoder) -> tuple[Turns | None, str]:
    """Take a chat template apart.

    Args:
        encoder: of a tokenizer.

    Returns:
        The texts around messages, None where there is no such; and in what the template differs from them.
    """
    if not encoder.tokenizer.chat_template:
        return None, "the model has no chat template"
    other = "A Go template cannot say the model's chat template"
    try:
        turns = _turns(encoder)
        if turns is None or '"""' in turns.go_template():
            return None, f"{other}: what stands around a message depends on the others."
        for shape in _SHAPES:
            if _rendered(encoder, _chat(shape)) != _with_bos(encoder, turns, _chat(shape)):
                return None, f"{other}: what stands around a message depends on the others."
        if turns.answer.rstrip() != turns.around["assistant"][0].rstrip():
            return None, f"{other}: an answer begins with more than its text, as a thought."
        today, other_day = (
            encoder.template.render(_chat("u"), "a probe", {"strftime_now": lambda _, day=day: day}).text
            for day in ("a", "b")
        )
        if today != other_day:
            return None, f"{other}: it tells the date."
        thoughtful = _chat("uau", a=_THOUGHT)
        if _rendered(encoder, thoughtful) != _with_bos(encoder, turns, thoughtful):
            return None, f"{other}: it rewrites thoughts in earlier answers."
        spaced = [_chat("uau", u=_SPACED), _chat("uau", a=_SPACED), _chat("su", s=_SPACED)]
        differ = any(_rendered(encoder, chat) != _with_bos(encoder, turns, chat) for chat in spaced)
    except DataError:
        return None, f"{other}: it refuses some conversations, such as those with a system prompt."
    said = "\nIt leaves white space at the ends of messages, which the model's takes off." if differ else ""
    return turns, f"TEMPLATE writes the turns of the model's chat template, without functions (tools).{said}"


def _turns(encoder: Encoder) -> Turns | None:
    texts = _TEXTS
    first, prompted = (_rendered(encoder, _chat("u"), prompted=prompted) for prompted in (False, True))
    text = _rendered(encoder, _chat("suau"))
    head, _, after = first.partition(texts["user"])
    opening, _, rest = text.partition(texts["system"])
    to_user, _, rest = rest.partition(texts["user"])
    to_answer, _, rest = rest.partition(texts["assistant"])
    back, _, end = rest.partition(texts["user"])
    if not (prompted.startswith(first) and to_answer.startswith(after) and end == after + prompted[len(first) :]):
        return None
    bos = _added_bos(encoder)
    head, opening = head.removeprefix(bos), opening.removeprefix(bos)
    asks = os.path.commonprefix([head[::-1], to_user[::-1], back[::-1]])[::-1]
    asks = re.sub(r"^[^<>\[\]]*[>\]]", "", asks).removeprefix(after)  # no part of a tag, nor the end of a turn
    around = {
        "system": (opening, to_user.removesuffix(asks)),
        "user": (asks, after),
        "assistant": (to_answer.removeprefix(after), back.removesuffix(asks)),
    }
    return Turns(head.removesuffix(asks), around, prompted[len(first) :])


def _with_bos(encoder: Encoder, turns: Turns, messages: list[Message]) -> str:
    """The text by turns, with a BOS where the template writes the one that the tokenizer adds."""
    text, bos = turns.text(messages), _added_bos(encoder)
    return text if not _rendered(encoder, messages).startswith(bos) else bos + text


def _added_bos(encoder: Encoder) -> str:
    """The BOS that the tokenizer adds to a text, "" without."""
    ids = encoder.encode_beginning("")
    return str(encoder.tokenizer.decode(ids)) if ids else ""


def _chat(shape: str, **contents: str) -> list[Message]:
    return [{"role": _ROLES[role], "content": contents.get(role, _TEXTS[_ROLES[role]])} for role in shape]


def _rendered(encoder: Encoder, messages: list[Message], *, prompted: bool = True) -> str:
    return encoder.template.render(messages, "a probe", add_generation_prompt=prompted).text


def _literal(text: str) -> str:
    """Text in a Go template."""
    return text.replace("{{", '{{ "{{" }}')
