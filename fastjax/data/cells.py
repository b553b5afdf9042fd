"""The values of a row by the meaning of their columns, with errors that name file, line and column."""

import json
from collections.abc import Mapping
from typing import Any

from convert.errors import shorten, shown
from fastjax.errors import DataError


class Cells:
    """A row's values by the meaning of their columns, and errors that name these.

    Attributes:
        where: File and line of the row.
    """

    def __init__(self, row: Any, where: str, columns: Mapping[str, str] | None, expected: str):
        """Take a row.

        Args:
            row: A mapping from column to value.
            where: File and line, for errors.
            columns: Meaning → column name; the default is the meaning itself.
            expected: The columns that a row may have, for errors.

        Raises:
            DataError: The row is no mapping.
        """
        self.where, self.columns = where, columns or {}
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object with {expected}, found {describe(row)}")
        self._row = row

    def __getitem__(self, meaning: str) -> Any:
        return self._row.get(self.columns.get(meaning, meaning))

    def name(self, meaning: str) -> str:
        """A column's name for errors."""
        return shown(self.columns.get(meaning, meaning), 80)

    def present(self) -> set[str]:
        """The columns whose values are not null."""
        return {name for name, value in self._row.items() if value is not None}

    def text(self, meaning: str) -> str:
        """A value that is a text; any other is a DataError."""
        return check_text(self[meaning], self.where, self.name(meaning))

    def wrong(self, meaning: str, expected: str) -> DataError:
        """The error for a value of another type."""
        return DataError(f"{self.where}: {self.name(meaning)} must be {expected}, found {describe(self[meaning])}")

    def lacks(self, expected: str, way_out: str = "") -> DataError:
        """The error for a row with other columns."""
        null = ((str(name), value is None) for name, value in self._row.items())
        listed = ", ".join(shorten(f"{name} (null)" if is_null else name, 80) for name, is_null in null) or "none"
        return DataError(
            f"{self.where}: expected the columns {expected}; the columns there are: {shorten(listed, 500)}{way_out}"
        )


def check_text(value: Any, where: str, name: str) -> str:
    """Raise DataError unless a value is a text.

    Args:
        value: The value; returned.
        where: File and line, for the error.
        name: The column's name.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be a string, found {describe(value)}")
    return value


def describe(value: Any) -> str:
    """A value as JSON, shortened, for errors.

    Args:
        value: Anything.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "what is nested too deep"
    text = text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair cannot be printed
    return text if len(text) <= 60 else f"{text[:57]}..."
