"""Block sizes of the kernel that turns rows to float8."""

import dataclasses

#: Most columns of a row that a program holds in registers.
MOST_COLUMNS = 32768
#: Likewise of codes whose blocks are brought to one scale.
MOST_JOINED = 2 * MOST_COLUMNS
_COLUMNS_PER_WARP = 1024


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """Block sizes of the Triton kernel, a row a program.

    Attributes:
        columns: of a row, rounded up to a power of two.
        num_warps: warps a program.
    """

    columns: int
    num_warps: int


def join_config(columns: int) -> RowConfig:
    """64 elements a thread, codes and factors: as measured on an H100 for 14,336 columns.

    Args:
        columns: of a row.
    """
    found = row_config(columns)
    return dataclasses.replace(found, num_warps=max(1, found.num_warps // 2))


def row_config(columns: int) -> RowConfig:
    """32 elements a thread, as many programs as a multiprocessor has threads for.

    Args:
        columns: of a row.
    """
    padded = max(16, 1 << (columns - 1).bit_length())
    return RowConfig(padded, max(1, padded // _COLUMNS_PER_WARP))
