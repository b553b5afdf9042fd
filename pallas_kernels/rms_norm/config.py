"""Sizes of the Triton kernels' programs."""

import dataclasses

from pallas_kernels import dispatch

#: Of the largest program, 32 warps.
MOST_FEATURES = 8192
#: Warps on a multiprocessor: the backward kernel has 64 registers.
_WARPS_A_CORE = 32
_CORES = 128


@dataclasses.dataclass(frozen=True)
class Programs:
    """The backward kernel's programs.

    Attributes:
        rows: of a program.
        num_warps: warps of a program.
    """

    rows: int
    num_warps: int


def warps(features: int) -> int:
    """Warps of a program that holds a row: a thread has 8 features, a load of 16 bytes."""
    return max(1, (1 << (features - 1).bit_length()) // 256)


def backward_config(rows: int, features: int) -> Programs:
    """As many programs as run at once: each leaves a row of sums for the weight's gradient."""
    num_warps = warps(features)
    programs = (dispatch.target().num_cores or _CORES) * max(1, _WARPS_A_CORE // num_warps)
    return Programs(rows=-(-rows // programs), num_warps=num_warps)
