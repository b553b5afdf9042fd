"""The check for lone surrogates, which JSON's escapes and a terminal's bytes can write and no tokenizer reads."""

from fastjax.errors import DataError


def check_characters(text: str, where: str) -> None:
    """Raise DataError unless a text is valid Unicode.

    Args:
        text: The text.
        where: Its place, for the error.

    Raises:
        DataError: It holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(error.start - 20, 0) : error.start]
        raise DataError(
            f"{where}: expected Unicode text, found \\u{ord(text[error.start]):04x}, half of a surrogate pair, behind "
            f"{before!r}; remove it, or write both halves"
        ) from error
