"""A data set as rows, with its counts."""

from typing import NamedTuple

from fastjax.data.packing import PackedRows
from fastjax.data.statistics import DataStatistics


class Dataset(NamedTuple):
    """A data set ready for `Batches`.

    Attributes:
        rows: Its rows.
        statistics: Counts of its examples and tokens.
        fingerprint: A checksum of the rows, independent of their origin.
        max_token_id: The largest token id, for which the model's embedding must have a row.
        from_cache: Whether an earlier run prepared it.
        now: The time that its chat template has told, in ISO 8601; None: none, or an earlier version did not keep it.
    """

    rows: PackedRows
    statistics: DataStatistics
    fingerprint: str
    max_token_id: int
    from_cache: bool = False
    now: str | None = None
