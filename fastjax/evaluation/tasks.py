"""Tasks of an evaluation: a YAML file that says what is asked and what counts as right (docs/evaluation.md)."""

import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len, MinLen, Predicate

from convert.errors import shown
from fastjax import strict_yaml
from fastjax.errors import ConfigError, DataError
from fastjax.generation.options import MAX_STOPS
from fastjax.options import checked
from fastjax.strict_yaml import YamlError

#: Letters of the choices.
_LETTERS = string.ascii_uppercase
_TEXTS = f"a list of at most {MAX_STOPS} texts that are not empty"


def _finds_something(pattern: str) -> bool:
    """Whether a text is a regular expression that does not match nothing, which would make every answer right."""
    try:
        return re.search(pattern, "") is None
    except re.error:
        return False


@checked("task")
class Task:
    """A task: its questions and its right answers."""

    name: str
    """of the task."""
    kind: Literal["exact_match", "choice"]
    """exact_match: the model's answer, or what `extract` finds in it, equals the row's; choice: the row's choice is the
    likeliest."""
    data: str
    """a file or data set, as `data.train` of a run."""
    prompt: str
    """text with columns in braces, {question}; {{ and }} are braces."""
    split: str | None = None
    """of the data set."""
    answer: str | None = None
    """the right answer for exact_match, a text with columns as the prompt is."""
    extract: Annotated[str, Predicate(_finds_something), "a regular expression that cannot match nothing"] | None = None
    """of exact_match: a regular expression whose last match, or its first group, is compared, both in the model's
    answer and the row's; null: the whole texts without the white space around them."""
    ignore_case: bool = False
    """of exact_match: whether case makes no difference."""
    until: Annotated[list[Annotated[str, MinLen(1)]], Len(0, MAX_STOPS), _TEXTS] | None = None
    """of exact_match: texts at the first of which an answer ends; null: without a chat and with few_shot, what stands
    between two examples, an empty line; else none."""
    max_new_tokens: Annotated[int, Interval(ge=1)] = 256
    """of exact_match: longest answer."""
    choices: str | Annotated[list[str], Len(2, len(_LETTERS)), "a list of 2 to 26 texts"] | None = None
    """of choice: the column with a list of texts, or a list of texts with columns."""
    label: str | None = None
    """of choice: the column with the right one: its number from 0, its letter, or its text; where the choices have
    labels of their own ({text: […], label: […]}), one of these."""
    chat: bool = True
    """put the prompt through the chat template."""
    few_shot: Annotated[int, Interval(ge=0)] = 0
    """rows of `few_shot_data`, the first ones, that stand before the prompt with their answers."""
    few_shot_data: str | None = None
    """their data set; null: none."""
    limit: Annotated[int, Interval(ge=1)] | None = None
    """the first rows alone; null: all."""

    def __post_init__(self):
        own = {"exact_match": ("answer", "extract", "until"), "choice": ("choices", "label")}
        for kind, keys in own.items():
            for key in keys:
                value = getattr(self, key)
                if kind != self.kind and value is not None:
                    raise ConfigError(f"task.{key}: expected none with kind {self.kind}, got {shown(value)}")
                if kind == self.kind and key not in ("extract", "until") and value is None:
                    raise ConfigError(f"task.{key}: expected one with kind {kind}, got none")
        if (self.few_shot > 0) != (self.few_shot_data is not None):
            raise ConfigError(
                f"task.few_shot_data: expected one exactly with few_shot, got {shown(self.few_shot_data)}"
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
        choices = row.get(self.choices)
        if isinstance(choices, Mapping):  # as the datasets of ARC have them: {text: […], label: […]}
            choices = choices.get("text")
        if not isinstance(choices, list | tuple) or len(choices) < 2 or {*map(type, choices)} != {str}:
            raise DataError(f"{where}: {self.choices}: expected a list of two texts or more, got {shown(choices)}")
        return list(choices)

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
        label = row.get(self.label)
        if (labels := self._labels_of(row, len(choices), where)) is not None:
            if isinstance(label, bool) or str(label) not in labels:
                raise DataError(
                    f"{where}: {self.label}: expected one of the labels {shown(labels)}, got {shown(label)}"
                )
            return labels.index(str(label))
        if isinstance(label, str) and label in choices:
            return choices.index(label)
        if isinstance(label, str) and len(label) == 1 and label.upper() in _LETTERS:
            label = _LETTERS.index(label.upper())
        if isinstance(label, str) and label.isdecimal():
            label = int(label)
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(choices):
            raise DataError(
                f"{where}: {self.label}: expected a number from 0 to {len(choices) - 1}, a letter or one of the "
                f"choices, got {shown(label)}"
            )
        return label

    def _labels_of(self, row: Mapping[str, Any], count: int, where: str) -> list[str] | None:
        """The choices' own labels, as ARC has them: letters from A, or numbers from 1; None: they have none."""
        column = row.get(self.choices) if isinstance(self.choices, str) else None
        labels = column.get("label") if isinstance(column, Mapping) else None
        if labels is None:
            return None
        if not isinstance(labels, list | tuple) or len({str(label) for label in labels}) != count:
            raise DataError(f"{where}: {self.choices}: label: expected {count} different labels, got {shown(labels)}")
        return [str(label) for label in labels]

    def compared(self, text: str) -> str | None:
        """The part of an answer that is compared; None: there is no match of `extract` in it."""
        if self.extract is not None:
            matches = [match for match in re.finditer(self.extract, text) if match.group()]
            if not matches:
                return None
            text = next((group for group in matches[-1].groups() if group is not None), matches[-1].group())
        text = text.strip()
        return text.casefold() if self.ignore_case else text


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
        document = strict_yaml.read(file.read_text(encoding="utf-8"))
    except (YamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    content = document.value
    if not isinstance(content, dict) or set(content) != {"tasks"} or not isinstance(content["tasks"], list):
        raise ConfigError(f"{file}: expected a list of tasks under `tasks`, got {shown(content)}")
    tasks = []
    for number, given in enumerate(content["tasks"]):
        line = document.line(("tasks", number))
        if not isinstance(given, dict):
            raise ConfigError(f"{file}:{line}: expected a task, a mapping, got {shown(given)}")
        try:
            tasks.append(Task(**{str(key): value for key, value in given.items()}))
        except ConfigError as error:
            what = str(error).removeprefix("task.")
            line = document.line(("tasks", number, what.partition(":")[0]))
            raise ConfigError(f"{file}:{line}: task {shown(given.get('name', number + 1))}: {what}") from error
    twice = {task.name for task in tasks if sum(other.name == task.name for other in tasks) > 1}
    if not tasks or twice:
        raise ConfigError(f"{file}: expected tasks of different names, got {shown(sorted(twice)) if twice else 'none'}")
    return tasks
