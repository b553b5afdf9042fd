"""What becomes of a key that stands for itself: the entries of a tool's table."""

from collections.abc import Callable
from typing import Any

from fastjax.config_import.job import Job, Row


def to(setting: str, default: Any = None, *, note: str = "") -> Row:
    """The value of another name.

    Args:
        setting: section.name.
        default: the tool's value where the key is absent.
        note: in what it differs.
    """
    return Row(lambda job, key, value: job.carry(key, setting, value, note), setting, default)


def to_number(setting: str, default: Any = None) -> Row:
    """A number of another name, which may be written as a text."""
    return Row(lambda job, key, value: job.carry(key, setting, job.to_number(key, value)), setting, default)


def to_list(setting: str) -> Row:
    """A list of names, which may be written as a text with commas; an empty one is null."""

    def apply(job: Job, key: str, value: Any) -> None:
        if names := job.names(key):
            job.carry(key, setting, names)
        else:
            job.not_needed[key] = "empty"

    return Row(apply, setting)


def unneeded(reason: str) -> Row:
    """A key that changes nothing here, whatever its value."""

    def apply(job: Job, key: str, value: Any) -> None:
        job.not_needed[key] = reason

    return Row(apply)


def lost(reason: str, harmless: Callable[[Any], bool] = lambda value: not value) -> Row:
    """A key without an equivalent, unless its value is harmless: by default, if it is off."""

    def apply(job: Job, key: str, value: Any) -> None:
        if harmless(value):
            job.not_needed[key] = "so it is here"
        else:
            job.not_carried[key] = reason

    return Row(apply)


def refused(reason: str, harmless: Callable[[Any], bool] = lambda value: not value) -> Row:
    """A key that would change the result, unless its value is harmless: by default, if it is off."""

    def apply(job: Job, key: str, value: Any) -> None:
        if harmless(value):
            job.not_needed[key] = "so it is here"
        else:
            job.refused[key] = reason

    return Row(apply)


def among(*values: Any) -> Callable[[Any], bool]:
    """Whether a value is one of these."""
    return lambda value: value in values
