"""Types of command-line arguments that several commands share."""

import argparse

from convert.errors import shorten


def positive(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {shorten(text)}")
    return int(text)
