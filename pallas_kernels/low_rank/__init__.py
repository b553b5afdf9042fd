"""Sums of large products with low-rank ones, and the gradients of these."""

from pallas_kernels.low_rank.api import (
    ADD,
    INPUT,
    OUTPUT,
    ROUND,
    low_rank_add,
    low_rank_input_gradients,
    low_rank_output_gradients,
    low_rank_round_rows,
)
from pallas_kernels.low_rank.xla import block_matrix

__all__ = [
    "ADD",
    "INPUT",
    "OUTPUT",
    "ROUND",
    "block_matrix",
    "low_rank_add",
    "low_rank_input_gradients",
    "low_rank_output_gradients",
    "low_rank_round_rows",
]
