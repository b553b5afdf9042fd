"""ConvertError, the error of unconvertible files, and the parts of its messages."""

import itertools
from collections.abc import Iterator, Sequence
from os import PathLike

from convert.limits import LISTED


class ConvertError(ValueError):
    """A file cannot be read, or arrays cannot be written; the message names file, field, expected and found value."""


def unexpected(file: str | PathLike[str], field: str, expected: str, given: object) -> ConvertError:
    """A ConvertError of the usual form.

    Args:
        file: The file that holds the field.
        field: Where in the file: a JSON field, a tensor's name, a byte range.
        expected: The expected value, in words.
        given: The value found, shortened by `shown`.

    Returns:
        The error, to be raised by the caller.
    """
    return ConvertError(f"{file}: {shorten(field)}: expected {expected}, got {shown(given)}")


def shorten(text: str, length: int = 200) -> str:
    """A text for a message, cut to its beginning and its length if it is long.

    Args:
        text: The text.
        length: Most characters of an uncut text.
    """
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def shown(value: object, length: int = 200) -> str:
    """A value's repr for a message, built no further than shown.

    Args:
        value: Any value, however large or deep.
        length: Most characters; a cut text ends with "…".
    """
    text = "".join(itertools.islice(_written(value, length), length + 1))
    return text if len(text) <= length else f"{text[:length]}…"


def _written(value: object, length: int) -> Iterator[str]:
    """The characters of a value's repr, lazily; long parts are cut."""
    if isinstance(value, str | bytes):
        yield from repr(value[: length + 1])
    elif type(value) in (list, tuple, dict):
        opening, closing = {list: "[]", tuple: "()", dict: "{}"}[type(value)]
        yield opening
        for number, item in enumerate(value):  # pyright: ignore[reportArgumentType]
            yield from ", " if number else ""
            yield from _written(item, length)
            if isinstance(value, dict):
                yield from ": "
                yield from _written(value[item], length)
        yield from ",)" if type(value) is tuple and len(value) == 1 else closing
    elif isinstance(value, int) and value.bit_length() > 4096:
        yield from f"an integer of {value.bit_length()} bits"
    else:
        yield from repr(value)


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first ones, and the number of the rest.

    Args:
        names: All of them.
    """
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return shorten(", ".join(names[:LISTED]), 2000) + more
