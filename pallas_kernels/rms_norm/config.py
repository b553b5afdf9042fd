"""Sizes of the Triton kernels' programs."""

from pallas_kernels import dispatch

#: Of the largest program, 32 warps.
MOST_FEATURES = 8192
#: Warps on a multiprocessor: the backward kernel has 64 registers.
_WARPS_A_CORE = 32


def warps(features: int) -> int:
    """Warps of a program that holds a row: a thread has 8 features, a load of 16 bytes."""
    return max(1, (1 << (features - 1).bit_length()) // 256)


def rows_of_program(rows: int, features: int) -> int:
    """Rows of a program of the backward kernel: as many programs as run at once, each leaves a row of sums."""
    return -(-rows // (dispatch.num_cores() * max(1, _WARPS_A_CORE // warps(features))))
