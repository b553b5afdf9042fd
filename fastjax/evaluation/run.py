"""An evaluation: prompts of a task's rows, the model's answers or choices, and how many are right."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from fastjax.data import Encoder
from fastjax.data.settings import DataOptions, DataSource
from fastjax.data.sources import open_sources
from fastjax.errors import ConfigError, DataError
from fastjax.evaluation.scoring import completion_scores
from fastjax.evaluation.tasks import Task, filled
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Reading
from fastjax.generation.text import answers_as_completed

#: Told how many rows are done.
_Done: TypeAlias = Callable[[int], None]
#: Batches between two reports of the progress.
_PART = 4
#: What stands between two examples of a plain text.
_BETWEEN = "\n\n"


class Result(NamedTuple):
    """A task's outcome.

    Attributes:
        task: its name.
        rows: how many there were.
        metrics: shares of the rows, by name, and under NAME_stderr their standard errors, of two rows or more.
            exact_match; or acc, of the choice with the largest log-probability, acc_norm, of that with the largest one
            a character, and acc_bytes, a byte; these three as lm-evaluation-harness has them.
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
    chat_template_kwargs: Mapping[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda task, done, rows: None,
) -> list[Result]:
    """Let a model do tasks.

    Args:
        model: with or without an adapter; with a tokenizer.
        tasks: what is asked.
        batch_size: rows of packed choices that go through the model together; prompts that are answered need none.
        chat_template_kwargs: variables of the chat template, as `enable_thinking`.
        progress: told a task's name, and how many of its rows are done of how many.

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
        progress(task.name, 0, len(rows))

        def done(count: int, name: str = task.name, total: int = len(rows)) -> None:
            progress(name, count, total)

        if task.kind == "exact_match":
            samples = _exact_match(model, task, rows, shots, chat_template_kwargs, done)
        else:
            samples = _choice(model, task, rows, shots, chat_template_kwargs, done, batch_size)
        results.append(Result(task.name, len(rows), _shares(task, samples), samples))
    return results


class _Row(NamedTuple):
    """A question: the turns of user and assistant before it and its prompt, with the right answer."""

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
    rows = []
    for row, where in itertools.islice(source.rows(), limit):
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object of columns, got {type(row).__name__}")
        prompt = filled(task.prompt, row, where)
        if task.kind == "choice":
            choices = task.choices_of(row, where)
            label = task.label_of(row, choices, where)
            rows.append(_Row([prompt], choices[label], choices, label))
            continue
        right = filled(task.answer or "", row, where)
        if task.compared(right) is None:
            raise DataError(f"{where}: expected a match of {task.extract!r} in the answer, got {right[:200]!r}")
        rows.append(_Row([prompt], right, [], 0))
    return rows


def _asked(task: Task, row: _Row, shots: Sequence[_Row]) -> Any:
    """The prompt with the examples before it: messages of a chat, or a text."""
    if not task.chat:
        return "".join(f"{shot.turns[0]}{_spaced(shot.answer)}{_BETWEEN}" for shot in shots) + row.turns[0]
    turns = [text for shot in shots for text in (shot.turns[0], shot.answer)] + row.turns
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]


def _spaced(text: str) -> str:
    """A completion of a plain text, which begins with white space."""
    return text if text[:1].isspace() else f" {text}"


def _exact_match(
    model: LanguageModel, task: Task, rows: list[_Row], shots: list[_Row], variables: Any, done: _Done
) -> list[dict[str, Any]]:
    prompts, until = [_asked(task, row, shots) for row in rows], tuple(dict.fromkeys(_until(task, shots)))
    options = GenerationOptions(max_new_tokens=task.max_new_tokens, stop_strings=until)
    reading = Reading(chat=task.chat, chat_template_kwargs=variables)
    answered = answers_as_completed(model, prompts, options, reading=reading, progress=lambda ended, _: done(ended))
    answers = dict(answered)
    return [
        {
            "prompt": row.turns[0],
            "expected": row.answer,
            "answer": answers[place][0].text,
            "finish_reason": answers[place][0].finish_reason,
            "right": task.compared(answers[place][0].text) == task.compared(row.answer),
        }
        for place, row in enumerate(rows)
    ]


def _until(task: Task, shots: Sequence[_Row]) -> Sequence[str]:
    """The texts that end an answer: a model that goes on with a question of its own has answered before it."""
    if task.until is not None:
        return task.until
    if task.chat or not shots:
        return ()
    if any(_BETWEEN in shot.answer.strip() for shot in shots):
        raise task.wrong("until", "expected what ends an answer, since the examples' have empty lines, got none")
    return (_BETWEEN,)


def _choice(
    model: LanguageModel,
    task: Task,
    rows: list[_Row],
    shots: list[_Row],
    variables: Any,
    done: _Done,
    batch_size: int,
) -> list[dict[str, Any]]:
    tokenizer: Any = model.tokenizer
    encoder = Encoder(tokenizer, DataOptions(chat_template_kwargs=variables))
    samples = []
    for start in range(0, len(rows), _PART * batch_size):
        part = rows[start : start + _PART * batch_size]
        pairs = [
            encoded_pair(encoder, _asked(task, row, shots), choice if task.chat else _spaced(choice))
            for row in part
            for choice in row.choices
        ]
        scores = iter(completion_scores(model, pairs, rows=batch_size))
        samples += [_chosen(row, [next(scores).log_prob for _ in row.choices]) for row in part]
        done(start + len(part))
    return samples


def _chosen(row: _Row, log_probs: list[float]) -> dict[str, Any]:
    """A row and what the model chooses, by the log-probabilities of its choices."""
    sizes = ((1,) * len(log_probs), map(len, row.choices), (len(choice.encode()) for choice in row.choices))
    divided = ([value / max(1, size) for value, size in zip(log_probs, each, strict=True)] for each in sizes)
    taken, by_length, by_bytes = (max(range(len(values)), key=values.__getitem__) for values in divided)
    return {
        "prompt": row.turns[0],
        "expected": row.label,
        "choices": row.choices,
        "log_probs": log_probs,
        "answer": taken,
        "right": taken == row.label,
        "right_by_length": by_length == row.label,
        "right_by_bytes": by_bytes == row.label,
    }


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


#: Metric of choices -> what counts.
_OF_CHOICE = {"acc": "right", "acc_norm": "right_by_length", "acc_bytes": "right_by_bytes"}


def _shares(task: Task, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the rows, and their standard errors."""
    names = {"exact_match": "right"} if task.kind == "exact_match" else _OF_CHOICE
    metrics, count = {}, len(samples)
    for name, key in names.items():
        share = sum(sample[key] for sample in samples) / count
        metrics[name] = share
        if count > 1:
            metrics[f"{name}_stderr"] = math.sqrt(share * (1 - share) / (count - 1))
    return metrics
