"""Tasks of an evaluation: a YAML file that says what is asked and what counts as right (docs/evaluation.md)."""

import dataclasses
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from convert.errors import shown
from fastjax import strict_yaml
from fastjax.errors import ConfigError, DataError
from fastjax.strict_yaml import YamlError

#: Letters of the choices.
_LETTERS = string.ascii_uppercase


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked, and what counts as right.

    Attributes:
        name: of the task.
        kind: exact_match: the model's answer, or what `extract` finds in it, equals the row's; choice: the row's choice
            is the likeliest.
        data: a file or data set, as `data.train` of a run.
        prompt: text with columns in braces, {question}; {{ and }} are braces.
        split: of the data set.
        answer: of exact_match: the right answer, likewise a text with columns.
        extract: of exact_match: a regular expression whose last match, or its first group, is compared, both in the
            model's answer and the row's; null: the whole texts without the white space around them.
        ignore_case: of exact_match: whether case makes no difference.
        until: of exact_match: texts at the first of which an answer ends; null: without a chat and with few_shot, what
            stands between two examples, an empty line; else none.
        max_new_tokens: of exact_match: longest answer.
        choices: of choice: the column with a list of texts, or a list of texts with columns.
        label: of choice: the column with the right one: its number from 0, its letter, or its text; where the choices
            have labels of their own ({text: […], label: […]}), one of these.
        chat: put the prompt through the chat template.
        few_shot: rows of `few_shot_data`, the first ones, that stand before the prompt with their answers.
        few_shot_data: their data set; null: none.
        limit: the first rows alone; null: all.
    """

    name: str
    kind: Literal["exact_match", "choice"]
    data: str
    prompt: str
    split: str | None = None
    answer: str | None = None
    extract: str | None = None
    ignore_case: bool = False
    until: Sequence[str] | None = None
    max_new_tokens: int = 256
    choices: str | Sequence[str] | None = None
    label: str | None = None
    chat: bool = True
    few_shot: int = 0
    few_shot_data: str | None = None
    limit: int | None = None

    def __post_init__(self):
        """Check what the kind needs.

        Raises:
            ConfigError: a key that is missing, does not belong to the kind or is of another type.
        """
        types: dict[str, Any] = {
            "name": str, "data": str, "prompt": str, "split": str, "answer": str, "extract": str, "ignore_case": bool,
            "max_new_tokens": int, "label": str, "chat": bool, "few_shot": int, "few_shot_data": str, "limit": int,
        }  # fmt: skip
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            wanted = types.get(field.name)
            if wanted is not None and (not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)):
                raise self.wrong(field.name, f"expected {_TYPES[wanted]}, got {shown(value)}")
        own = {"exact_match": ("answer", "extract", "until"), "choice": ("choices", "label")}
        if not isinstance(self.kind, str) or self.kind not in own:
            raise self.wrong("kind", f"expected exact_match or choice, got {shown(self.kind)}")
        for kind, keys in own.items():
            for key in keys:
                if kind != self.kind and getattr(self, key) is not None:
                    raise self.wrong(key, f"expected none with kind {self.kind}, got {shown(getattr(self, key))}")
                if kind == self.kind and key not in ("extract", "until") and getattr(self, key) is None:
                    raise self.wrong(key, f"expected one with kind {self.kind}, got none")
        for key, least in (("max_new_tokens", 1), ("few_shot", 0), ("limit", 1)):
            if (value := getattr(self, key)) is not None and value < least:
                raise self.wrong(key, f"expected at least {least}, got {value}")
        if (self.few_shot > 0) != (self.few_shot_data is not None):
            raise self.wrong("few_shot_data", f"expected one exactly with few_shot, got {shown(self.few_shot_data)}")
        if self.choices is not None and not isinstance(self.choices, str):
            texts = isinstance(self.choices, list | tuple) and all(isinstance(one, str) for one in self.choices)
            if not texts or not 2 <= len(self.choices) <= len(_LETTERS):
                raise self.wrong("choices", f"expected a column or 2 to 26 texts, got {shown(self.choices)}")
        texts = isinstance(self.until, list | tuple) and all(isinstance(one, str) and one for one in self.until)
        if self.until is not None and not texts:
            raise self.wrong("until", f"expected a list of texts that are not empty, got {shown(self.until)}")
        try:
            found = None if self.extract is None else re.search(self.extract, "")
        except re.error as error:
            raise self.wrong("extract", f"expected a regular expression, got {self.extract!r}: {error}") from error
        if found is not None:
            raise self.wrong(
                "extract",
                f"expected one that cannot match nothing, which makes every answer right, got {self.extract!r}",
            )

    def wrong(self, key: str, what: str) -> ConfigError:
        """An error about one of the keys."""
        return ConfigError(f"task {shown(self.name)}: {key}: {what}")

    def choices_of(self, row: Mapping[str, Any], where: str) -> list[str]:
        """The choices of a row of data.

        Args:
            row: by column.
            where: its place, for errors.

        Raises:
            DataError: it has none.
        """
        if not isinstance(self.choices, str):
            return [filled(choice, row, where) for choice in self.choices or ()]
        found = row.get(self.choices)
        if isinstance(found, Mapping):  # as the datasets of ARC have them: {text: […], label: […]}
            found = found.get("text")
        if not isinstance(found, list | tuple) or len(found) < 2 or not all(isinstance(one, str) for one in found):
            raise DataError(f"{where}: {self.choices}: expected a list of two texts or more, got {shown(found)}")
        return list(found)

    def label_of(self, row: Mapping[str, Any], choices: Sequence[str], where: str) -> int:
        """The number of the right choice.

        Args:
            row: by column.
            choices: of it.
            where: its place, for errors.

        Raises:
            DataError: none of them is said to be right.
        """
        assert self.label is not None
        found = row.get(self.label)
        if (labels := self._labels_of(row, len(choices), where)) is not None:
            if isinstance(found, bool) or str(found) not in labels:
                raise DataError(
                    f"{where}: {self.label}: expected one of the labels {shown(labels)}, got {shown(found)}"
                )
            return labels.index(str(found))
        if isinstance(found, str) and found in choices:
            return choices.index(found)
        if isinstance(found, str) and len(found) == 1 and found.upper() in _LETTERS:
            found = _LETTERS.index(found.upper())
        if isinstance(found, str) and found.isdecimal():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < len(choices):
            raise DataError(
                f"{where}: {self.label}: expected a number from 0 to {len(choices) - 1}, a letter or one of the "
                f"choices, got {shown(found)}"
            )
        return found

    def _labels_of(self, row: Mapping[str, Any], count: int, where: str) -> list[str] | None:
        """The choices' own labels, as ARC has them: letters from A, or numbers from 1; None: they have none."""
        column = row.get(self.choices) if isinstance(self.choices, str) else None
        labels = column.get("label") if isinstance(column, Mapping) else None
        if labels is None:
            return None
        if not isinstance(labels, list | tuple) or len({str(label) for label in labels}) != count:
            raise DataError(f"{where}: {self.choices}: label: expected {count} different labels, got {shown(labels)}")
        return [str(label) for label in labels]

    def ended(self, text: str, until: Sequence[str]) -> str:
        """An answer up to the first of some texts.

        Args:
            text: the answer.
            until: the texts.
        """
        places = [place for end in until if (place := text.find(end)) >= 0]
        return text[: min(places)] if places else text

    def compared(self, text: str) -> str | None:
        """What of an answer is compared; None: there is no match of `extract` in it."""
        if self.extract is not None:
            matches = [match for match in re.finditer(self.extract, text) if match.group()]
            if not matches:
                return None
            text = next((group for group in matches[-1].groups() if group is not None), matches[-1].group())
        text = text.strip()
        return text.casefold() if self.ignore_case else text


_TYPES = {str: "a text", int: "a whole number", bool: "true or false"}


def filled(template: str, row: Mapping[str, Any], where: str) -> str:
    """A text with a row's columns.

    Args:
        template: with columns in braces; {{ and }} are braces.
        row: by column.
        where: its place, for errors.

    Raises:
        DataError: a column that the row lacks, or that is no text or number.
        ConfigError: a template that is none.
    """
    parts = []
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{shown(template)}: expected a text with columns in braces ({{{{ is a brace): {error}"
        ) from None
    for text, name, spec, conversion in pieces:
        parts.append(text)
        if name is None:
            continue
        if spec or conversion or name not in row:
            columns = ", ".join(map(str, row))
            raise DataError(f"{where}: expected a column {shown(name)} for {shown(template)}, got {columns}")
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(f"{where}: {name}: expected a text or a number, got {shown(value)}")
        parts.append(str(value))
    return "".join(parts)


def read_tasks(file: Path) -> list[Task]:
    """Read the tasks of a YAML file; paths of data in it are relative to the current folder.

    Args:
        file: with a list `tasks`.

    Raises:
        ConfigError: what is wrong with it, and in which task.
        OSError: it cannot be read.
    """
    try:
        found = strict_yaml.parse(file.read_text(encoding="utf-8"))
    except (YamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(found, dict) or set(found) != {"tasks"} or not isinstance(found["tasks"], list):
        raise ConfigError(f"{file}: expected a list of tasks under `tasks`, got {shown(found)}")
    names = {field.name for field in dataclasses.fields(Task)}
    needed = {field.name for field in dataclasses.fields(Task) if field.default is dataclasses.MISSING}
    tasks = []
    for number, given in enumerate(found["tasks"], 1):
        if not isinstance(given, dict):
            raise ConfigError(f"{file}: task {number}: expected a mapping, got {shown(given)}")
        unknown, missing = sorted(set(given) - names, key=str), sorted(needed - set(given))
        if unknown or missing:
            what = f"got {shown(unknown[0])}" if unknown else f"got none of {', '.join(missing)}"
            raise ConfigError(f"{file}: task {number}: expected the keys {', '.join(sorted(names))}; {what}")
        tasks.append(Task(**given))
    twice = {task.name for task in tasks if sum(other.name == task.name for other in tasks) > 1}
    if not tasks or twice:
        raise ConfigError(f"{file}: expected tasks of different names, got {shown(sorted(twice)) if twice else 'none'}")
    return tasks
