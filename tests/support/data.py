"""Options of data for tests."""

from typing import Any

from fastjax.data import DataOptions


def uncached(**options: Any) -> DataOptions:
    """Options of data that are prepared each time.

    Args:
        options: Those that are not the defaults.
    """
    return DataOptions(**{"cache_dir": None, **options})
