"""A data set's rows as a trainer learns them, for people to look at: token ids and labels, encoded when asked for."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from fastjax.data.columns import parse_row
from fastjax.data.encoding import Encoder
from fastjax.data.sources import OpenSource


class EncodedRows(Sequence[dict[str, list[int]]]):
    """Rows with the columns input_ids, attention_mask and labels: -100 where a token is not learnt.

    A row longer than a run's rows is whole here. `rows[5]` is a dict, `rows["labels"]` a list of all rows'.

    Attributes:
        column_names: of a row.
    """

    column_names = ("input_ids", "attention_mask", "labels")

    def __init__(self, sources: Sequence[OpenSource], encoder: Callable[[], Encoder]):
        """Take the data sets.

        Args:
            sources: in order.
            encoder: makes what encodes them, once a row is asked for.
        """
        self._sources, self._make = sources, encoder
        self._encoder: Encoder | None = None

    @functools.cached_property
    def _sizes(self) -> list[int]:
        data = [(source, source.dataset) for source in self._sources]
        return [len(rows) if hasattr(rows, "__len__") else sum(1 for _ in source.rows()) for source, rows in data]

    def __len__(self) -> int:
        return sum(self._sizes)

    @overload
    def __getitem__(self, index: int) -> dict[str, list[int]]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, list[int]]]: ...
    @overload
    def __getitem__(self, index: str) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return [row[index] for row in self]
        numbers = range(len(self))[index]
        return self._row(numbers) if isinstance(numbers, int) else [self._row(number) for number in numbers]

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for source in self._sources:
            yield from map(self._encoded, source.records(parse_row))

    def __repr__(self) -> str:
        return f"EncodedRows(features: {list(self.column_names)}, num_rows: {len(self)})"

    def _row(self, number: int) -> dict[str, list[int]]:
        for source, size in zip(self._sources, self._sizes, strict=True):
            if number < size:
                return self._encoded(next(source.records(parse_row, skip=number)))
            number -= size
        raise IndexError(number)

    def _encoded(self, record: Any) -> dict[str, list[int]]:
        if self._encoder is None:
            self._encoder = self._make()
        examples = next(iter(self._encoder.encode([record])))
        tokens, learn = examples[len(examples) - 1]  # behind beginnings that a template rewrites later
        labels = np.where(learn, tokens, -100).tolist()
        return {"input_ids": tokens.tolist(), "attention_mask": [1] * len(tokens), "labels": labels}
