"""Regular expressions from files, matched in bounded time: backtracking can take hours."""

import functools
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

import regex

from convert.errors import ConvertError
from convert.limits import MATCH_SECONDS

_QUICK = 1e-3  # seconds; shorter matches are not counted


class Pattern:
    """A compiled expression with its remaining time."""

    def __init__(self, text: str):
        self.text, self.compiled, self.left = text, regex.compile(text), MATCH_SECONDS

    def spend(self, method: str, name: str) -> "regex.Match[str] | None":
        """Match; raise once the expression's time is used up."""
        begin = time.thread_time()
        try:
            matched = getattr(self.compiled, method)(name, timeout=max(self.left, _QUICK))
        except TimeoutError:
            matched, self.left = None, 0.0
        taken = time.thread_time() - begin
        if taken > _QUICK:
            self.left -= taken
        if self.left <= 0:
            raise ConvertError(
                f"the regular expression {self.text[:200]!r}: expected to be matched with every module within "
                f"{MATCH_SECONDS:g} s, took longer; name the modules in a list, or write it without nested repetitions"
            )
        return matched


def mistake(text: str) -> str:
    """The error in an expression; empty if it is valid.

    Args:
        text: The expression.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "possible nested set": a later Python may read it differently
            re.compile(text)
            regex.compile(text)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


@functools.lru_cache(maxsize=1024)
def _pattern(text: str) -> Pattern:
    return Pattern(text)


def fullmatch(text: str, name: str) -> "regex.Match[str] | None":
    """`re.fullmatch` in bounded time.

    Args:
        text: A valid expression, see `mistake`.
        name: The string to match.

    Raises:
        ConvertError: More than `limits.MATCH_SECONDS` over all calls.
    """
    return _pattern(text).spend("fullmatch", name)


def match(text: str, name: str) -> "regex.Match[str] | None":
    """`re.match` in bounded time.

    Args:
        text: As in `fullmatch`.
        name: As in `fullmatch`.

    Raises:
        ConvertError: As in `fullmatch`.
    """
    return _pattern(text).spend("match", name)


def first_match(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of a name in PEFT's `rank_pattern` and `alpha_pattern` (``get_pattern_key``).

    Args:
        patterns: Regular expression for the last parts of a name -> value; the first match counts.
        name: A module's or parameter's, whole.
        default: Where none matches.
    """
    for pattern, value in patterns.items():
        if match(rf"(.*\.)?({pattern})$", name):
            return value
    return patterns.get(name, default)
