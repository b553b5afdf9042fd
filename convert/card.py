"""Model cards (README.md): base, adapter, training and use of what is saved."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from convert.adapter_config import SCORED, AdapterConfig

CARD = "README.md"
#: By which a card is known as one that is written here, and may be written again.
MARK = "<!-- Written by fastjax, which writes it again with the files. Without this line the card stays as it is. -->"
_SHOWN = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)
_SHOWN += ("layers_to_transform", "modules_to_save", "trainable_token_indices")
_TRAINING, _FIELDS = "## Training", re.compile(r"\A---\n(.*?)^---$", re.MULTILINE | re.DOTALL)


class Training(NamedTuple):
    """A training, as a card tells it.

    Attributes:
        text: Data, figures and settings, in Markdown.
        datasets: Names on the hub.
    """

    text: str
    datasets: tuple[str, ...] = ()


class Card(NamedTuple):
    """The contents of a card.

    Attributes:
        base: Name or folder of the base model; "": unknown.
        library: "peft" or "transformers", the one that loads the files.
        about: Lines below the title.
        adapter: PEFT's settings; None: every weight was trained.
        training: None: unknown.
        use: Code, each with its language.
        source: Folder of the base, whose card has its licence; None: unknown.
        tags: More of the hub's tags.
    """

    base: str
    library: str
    about: Sequence[str]
    adapter: AdapterConfig | None
    training: Training | None = None
    use: Sequence[tuple[str, str]] = ()
    source: Path | None = None
    tags: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The file."""
        title = f"{Path(self.base).name}, fine-tuned" if self.base else "A fine-tuned model"
        lines = [*self._front_matter(), MARK, "", f"# {title}", "", *self.about]
        if self.use:
            lines += ["", "## Use it"]
        for language, code in self.use:
            lines += ["", f"```{language}", code, "```"]
        if self.adapter is not None:
            settings = {name: getattr(self.adapter, name) for name in _SHOWN}
            shown = {name: value for name, value in settings.items() if value not in (None, False, {}, [])}
            lines += ["", "## Adapter", "", "```json", json.dumps(shown, indent=2, ensure_ascii=False), "```"]
        if self.training is not None:
            lines += ["", _TRAINING, "", self.training.text]
        return "\n".join(lines) + "\n"

    def _front_matter(self) -> list[str]:
        """The fields of the hub."""
        scored = self.adapter is not None and self.adapter.task_type == SCORED
        named = is_name(self.base)
        lora = [] if self.adapter is None else ["lora"]
        relation = [f"base_model:adapter:{self.base}"] if named and self.library == "peft" else []
        fields = [
            *([f"base_model: {self.base}"] if named else []),
            f"library_name: {self.library}",
            f"pipeline_tag: {'text-classification' if scored else 'text-generation'}",
            *([] if self.source is None else _licence(self.source)),
        ]
        lists = {"datasets": () if self.training is None else self.training.datasets}
        lists["tags"] = (*relation, "fastjax", *lora, *self.tags)
        for name, values in lists.items():
            fields += [f"{name}:", *(f"- {value}" for value in values)] if values else []
        return ["---", *fields, "---"]


def write_card(folder: Path, card: Card, place: Path | None = None) -> None:
    """Write a card, unless the folder has one of somebody else, which stays and is told.

    Args:
        folder: Where it is written.
        card: Its contents.
        place: The final folder; None: the same.
    """
    earlier = (place or folder) / CARD
    if is_foreign(earlier):
        print(f"note: {earlier} is not fastjax's, and stays as it is: no model card is written", file=sys.stderr)
    else:
        (folder / CARD).write_text(card.text, encoding="utf-8")


def is_foreign(file: Path) -> bool:
    """Whether a file is there that is no card of `write_card`.

    Args:
        file: Of a card.
    """
    return file.is_file() and MARK not in file.read_text("utf-8", errors="replace")


def read_training(folder: Path) -> Training | None:
    """The training in the card of a folder; None: there is no card of `write_card`, or it has none.

    Args:
        folder: Of an adapter or a model.
    """
    file = folder / CARD
    if not file.is_file() or is_foreign(file):
        return None
    text = file.read_text("utf-8", errors="replace")
    _, heading, training = text.partition(f"\n{_TRAINING}\n")
    fields = _FIELDS.search(text)
    names = re.search(r"^datasets:\n((?:- \S+\n)+)", fields[1] if fields else "", re.MULTILINE)
    datasets = re.findall(r"- (\S+)", names[1]) if names else ()
    return Training(training.strip(), tuple(datasets)) if heading else None


def renamed(text: str, folder: str, name: str) -> str:
    """A card whose code names a folder otherwise.

    Args:
        text: Of the card.
        folder: The name in its code.
        name: In place of it, such as that of a repository.
    """
    word = re.compile(rf'(?<=[\s"]){re.escape(folder)}(?=["\s])')
    parts = text.split("```")
    return "```".join(word.sub(lambda _: name, part) if number % 2 else part for number, part in enumerate(parts))


def whole_use(name: str, *, scored: bool = False) -> list[tuple[str, str]]:
    """Code that loads a whole model folder.

    Args:
        name: Of the folder.
        scored: Whether it is a reward model.
    """
    auto = f"AutoModelFor{'SequenceClassification' if scored else 'CausalLM'}"
    python = (
        f"from transformers import {auto}, AutoTokenizer\n\n"
        f'model = {auto}.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    )
    commands = (
        f"fastjax chat {name}",
        f"vllm serve {name}",
        f"fastjax convert gguf {name} {name}-q8_0.gguf --type q8_0",
        f"llama-server -m {name}-q8_0.gguf --jinja",
    )
    return [*([] if scored else [("bash", "\n".join(commands))]), ("python", python)]


def is_name(base: str) -> bool:
    """Whether a base is a name on the hub; a local folder tells others nothing.

    Args:
        base: Name or folder.
    """
    return re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not Path(base).exists()


def _licence(source: Path) -> list[str]:
    """The fields of the licence in the card of a base."""
    file = source / CARD
    fields = _FIELDS.search(file.read_text("utf-8", errors="replace")) if file.is_file() else None
    return [] if fields is None else re.findall(r"^license(?:_name|_link)?: *\S.*$", fields[1], re.MULTILINE)
