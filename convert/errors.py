"""The one error that says a file, or what it holds, cannot be converted."""

from os import PathLike


class ConvertError(ValueError):
    """A file cannot be read, or arrays cannot be written: the message names file, field, expected and given."""


def unexpected(file: str | PathLike[str], field: str, expected: str, given: object) -> ConvertError:
    """The usual sentence of a ConvertError.

    Args:
        file: The file that holds the field.
        field: Where in the file: a JSON field, a tensor's name, a byte range.
        expected: What would have been right, in words.
        given: What was there; its repr is shortened to 200 characters.

    Returns:
        The error, to be raised by the caller.
    """
    shown = repr(given)
    if len(shown) > 200:
        shown = f"{shown[:200]}… ({len(shown)} characters)"
    return ConvertError(f"{file}: {field}: expected {expected}, got {shown}")
