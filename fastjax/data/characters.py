"""Texts that are no Unicode: JSON's escapes and a terminal's bytes can write what no tokenizer can read."""

from fastjax.errors import DataError


def check_characters(text: str, where: str) -> None:
    """Refuse a text that no tokenizer can read.

    Args:
        text: The text.
        where: Where it comes from.

    Raises:
        DataError: Half of a surrogate pair is in it, as JSON's escapes can write it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(error.start - 20, 0) : error.start]
        raise DataError(
            f"{where}: expected Unicode text, found \\u{ord(text[error.start]):04x}, half of a surrogate pair, behind "
            f"{before!r}; remove it, or write both halves"
        ) from error
