"""The passes between the large products of a layer for a few rows, as in decoding."""

from pallas_kernels.few_rows.api import (
    MOST_ROWS,
    Adapters,
    add,
    gate,
    heads,
    normed_products,
    rank_products,
    why_not,
)

__all__ = ["MOST_ROWS", "Adapters", "add", "gate", "heads", "normed_products", "rank_products", "why_not"]
