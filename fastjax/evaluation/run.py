"""An evaluation: prompts of a task's rows, the model's answers or choices, and how many are right."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastjax.data import Encoder
from fastjax.data.settings import DataSource
from fastjax.data.sources import open_sources
from fastjax.errors import ConfigError, DataError
from fastjax.evaluation.scoring import completion_scores
from fastjax.evaluation.tasks import Task, filled
from fastjax.generation.text import answer
from fastjax.language_model import LanguageModel


class Result(NamedTuple):
    """A task's outcome.

    Attributes:
        task: its name.
        rows: how many there were.
        metrics: shares of the rows, by name, and under NAME_stderr their standard errors, of two rows or more.
            exact_match; or acc, of the choice with the largest log-probability, and acc_norm, of that with the largest
            one a byte.
        samples: for each row what was asked, what was right and what the model said.
    """

    task: str
    rows: int
    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]]


def evaluate(
    model: LanguageModel,
    tasks: Sequence[Task],
    *,
    batch_size: int = 32,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Let a model do tasks.

    Args:
        model: with or without an adapter; with a tokenizer.
        tasks: what is asked.
        batch_size: prompts, or rows of packed choices, that go through the model together.
        progress: takes a line before each task.

    Raises:
        ConfigError: a model without tokenizer or, where a task asks for one, chat template.
        DataError: a row that a task cannot use.
        OSError: data that cannot be read.
    """
    if model.tokenizer is None:
        raise ConfigError("evaluate: expected a model with a tokenizer, got one without; load it from a folder")
    read = [(task, _rows(task)) for task in tasks]  # before the first one takes its time
    results = []
    for task, (rows, shots) in read:
        progress(f"{task.name}: {len(rows):,} rows, {task.kind}")
        run = _exact_match if task.kind == "exact_match" else _choice
        results.append(run(model, task, rows, shots, batch_size))
    return results


class _Row(NamedTuple):
    """What is asked: texts that are said before, user's and assistant's by turns, and the prompt; and what is right."""

    turns: list[str]
    answer: str
    choices: list[str]
    label: int


def _rows(task: Task) -> tuple[list[_Row], list[_Row]]:
    """A task's rows, and those that stand before each of them."""
    few = [] if task.few_shot_data is None else _read(task, task.few_shot_data, None, task.few_shot)
    if len(few) < task.few_shot:
        raise task.wrong(
            "few_shot", f"expected at most the {len(few)} rows of {task.few_shot_data}, got {task.few_shot}"
        )
    rows = _read(task, task.data, task.split, task.limit)
    if not rows:
        raise DataError(f"task {task.name}: {task.data}: expected at least one row, got none")
    return rows, few


def _read(task: Task, path: str, split: str | None, limit: int | None) -> list[_Row]:
    [source] = open_sources(DataSource(path, split=split))
    found = []
    for row, where in itertools.islice(source.rows(), limit):
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object of columns, got {type(row).__name__}")
        prompt = filled(task.prompt, row, where)
        if task.kind == "choice":
            choices = task.choices_of(row, where)
            label = task.label_of(row, choices, where)
            found.append(_Row([prompt], choices[label], choices, label))
            continue
        right = filled(task.answer or "", row, where)
        if task.compared(right) is None:
            raise DataError(f"{where}: expected a match of {task.extract!r} in the answer, got {right[:200]!r}")
        found.append(_Row([prompt], right, [], 0))
    return found


def _asked(task: Task, row: _Row, shots: Sequence[_Row]) -> Any:
    """The prompt with the examples before it: messages of a chat, or a text."""
    if not task.chat:
        return "".join(f"{shot.turns[0]}{_spaced(shot.answer)}\n\n" for shot in shots) + row.turns[0]
    turns = [text for shot in shots for text in (shot.turns[0], shot.answer)] + row.turns
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]


def _spaced(text: str) -> str:
    """A completion of a plain text, which begins with white space."""
    return text if text[:1].isspace() else f" {text}"


def _exact_match(model: LanguageModel, task: Task, rows: list[_Row], shots: list[_Row], batch_size: int) -> Result:
    prompts = [_asked(task, row, shots) for row in rows]
    said = answer(model, prompts, chat=task.chat, max_new_tokens=task.max_new_tokens, batch_size=batch_size)
    right = [task.compared(text) == task.compared(row.answer) for text, row in zip(said, rows, strict=True)]
    samples = [
        {"prompt": row.turns[0], "expected": row.answer, "answer": text, "right": one}
        for row, text, one in zip(rows, said, right, strict=True)
    ]
    return Result(task.name, len(rows), _shares(exact_match=right), samples)


def _choice(model: LanguageModel, task: Task, rows: list[_Row], shots: list[_Row], batch_size: int) -> Result:
    encoder = Encoder(model.tokenizer)  # pyright: ignore[reportArgumentType]
    examples, places = [], []
    for row in rows:
        asked = _asked(task, row, shots)
        places.append(len(examples))
        examples += [encoded_pair(encoder, asked, choice if task.chat else _spaced(choice)) for choice in row.choices]
    scores = completion_scores(model, examples, rows=batch_size)
    plain, by_byte, samples = [], [], []
    for row, start in zip(rows, places, strict=True):
        found = [score.log_prob for score in scores[start : start + len(row.choices)]]
        lengths = [len(choice.encode("utf-8", "surrogatepass")) for choice in row.choices]
        taken = max(range(len(found)), key=found.__getitem__)
        by_length = max(range(len(found)), key=lambda n: found[n] / max(1, lengths[n]))
        plain.append(taken == row.label)
        by_byte.append(by_length == row.label)
        samples.append(
            {"prompt": row.turns[0], "expected": row.label, "choices": row.choices, "log_probs": found, "answer": taken}
            | {"right": plain[-1]}
        )
    return Result(task.name, len(rows), _shares(acc=plain, acc_norm=by_byte), samples)


def encoded_pair(encoder: Encoder, prompt: Any, completion: str) -> tuple[list[int], list[int]]:
    """A prompt's tokens and its completion's.

    Args:
        encoder: of the model's tokenizer.
        prompt: messages, or a text: then both are encoded as one, as a text's tokens may reach over the place between.
        completion: a text.
    """
    if not isinstance(prompt, str):
        ids = encoder.tokenizer.encode(completion, add_special_tokens=False)
        return encoder.encode_prompt(prompt), [int(token) for token in ids]
    whole = encoder.encode_beginning(prompt + completion)
    place = min(len(encoder.encode_beginning(prompt)), len(whole) - 1)
    return whole[:place], whole[place:]


def _shares(**right: list[bool]) -> dict[str, float]:
    """Shares, and their standard errors."""
    metrics = {}
    for name, values in right.items():
        share, count = sum(values) / len(values), len(values)
        metrics[name] = share
        if count > 1:
            metrics[f"{name}_stderr"] = math.sqrt(share * (1 - share) / (count - 1))
    return metrics
