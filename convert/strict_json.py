"""Strict JSON (RFC 8259): every failure is a `JsonError` with line and column.

The standard library's decoder accepts duplicate keys (the last wins) and lone surrogates, which nothing can write out
again, and reports deep nesting and very long integers obscurely. All of these are a `JsonError` here. NaN and Infinity,
which it accepts too, are left to the number's reader.
"""

import json
import re
from typing import Any

from convert.errors import shorten

MAX_DEPTH = 100
"""Objects and arrays within each other: what is read can be walked, written and shown by recursion."""

MAX_DIGITS = 300
"""Digits of an integer, so that it is a float without overflow, and is written out in no time."""

_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[{}\[\]:]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonError(ValueError):
    """An error in a JSON text.

    Attributes:
        problem: Its description.
        line: From 1.
        column: From 1.
    """

    def __init__(self, problem: str, text: str, position: int):
        self.problem = problem
        self.line = text.count("\n", 0, position) + 1
        self.column = position - text.rfind("\n", 0, position)
        super().__init__(f"line {self.line}, column {self.column}: {problem}")


class _Refused(ValueError):
    """An error of the decoder's hooks, without a position; `_find` adds it."""


def parse(text: str) -> Any:
    """Parse a text of one JSON value.

    Args:
        text: The text.

    Returns:
        The value.

    Raises:
        JsonError: Invalid JSON, text after the value, a duplicate key, a lone surrogate, an integer of more than
            `MAX_DIGITS` digits, or nesting deeper than `MAX_DEPTH`.
    """
    value, end = decode(text, skip_space(text, 0))
    end = skip_space(text, end)
    if end < len(text):
        raise JsonError("something stands behind the value", text, end)
    return value


def decode(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value at an index.

    Args:
        text: The text.
        start: Index of the value's first character.

    Returns:
        The value, and the index after it.

    Raises:
        JsonError: As for `parse`.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, text, error.pos) from None
    except (RecursionError, _Refused):
        raise _find(text, start) from None
    openings = text.count("[", start, end) + text.count("{", start, end)
    if openings > MAX_DEPTH and is_deep(value):
        raise _find(text, start)
    if (text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0) and has_surrogate(value):
        raise _find(text, start)
    return value, end


def skip_space(text: str, index: int) -> int:
    """The first index from `index` on that is not white space."""
    while text[index : index + 1] in (" ", "\n", "\r", "\t"):
        index += 1
    return index


def is_deep(value: Any) -> bool:
    """Whether lists and mappings nest deeper than `MAX_DEPTH`.

    Args:
        value: Any value without cycles.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return bool(level)


def has_surrogate(value: Any) -> bool:
    """Whether a string in a value, or a key, has a lone surrogate, which no encoding can write.

    Args:
        value: A string; or lists and mappings, at most `MAX_DEPTH` deep.
    """
    if isinstance(value, str):
        return not value.isascii() and _SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(has_surrogate(key) or has_surrogate(inner) for key, inner in value.items())
    return isinstance(value, list | tuple) and any(map(has_surrogate, value))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise _Refused
    return result


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)


def _find(text: str, start: int) -> JsonError:
    """The error of the decoder or its hooks, with its position."""
    keys: list[set[str] | None] = []  # of each open object; None for an array
    last: re.Match[str] | None = None
    for token in _TOKEN.finditer(text, start):
        mark = token[0]
        if mark in ("{", "["):
            keys.append(set() if mark == "{" else None)
            if len(keys) > MAX_DEPTH:
                return JsonError(f"nested more than {MAX_DEPTH} deep", text, token.start())
        elif mark in ("}", "]"):
            if keys:  # else it closes the enclosing value
                keys.pop()
        elif mark == ":" and last is not None and keys and (seen := keys[-1]) is not None:
            key = json.loads(last[0]) if "\\" in last[0] else last[0][1:-1]
            if key in seen:
                shown = json.dumps(key, ensure_ascii=False)[1:-1]
                return JsonError(f"the same key twice: {shorten(shown, 60)}", text, last.start())
            seen.add(key)
        elif mark.startswith('"'):
            if "\\u" in mark and has_surrogate(json.loads(mark)):
                return JsonError("an escape that is half a character (a lone surrogate)", text, token.start())
        elif len(mark) > MAX_DIGITS and mark.removeprefix("-").isdecimal():
            return JsonError(f"an integer of more than {MAX_DIGITS} digits", text, token.start())
        last = token
    return JsonError("nested too deep", text, start)  # deeper than the rest of Python's stack
