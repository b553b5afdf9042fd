"""Tiles of a product over groups, as a table that the kernels' thread blocks walk through.

The number of tiles depends on the sizes of the groups and the table's length on their bound alone, so that nothing is
read back from the device. Tiles of a group are numbered down its rows first: thread blocks side by side read the same
columns of its matrix.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

#: The copy engine's tiles are eight rows high, and copies begin with one.
ALIGNED = 8
#: Rows past the last group that are zeros. A piece of a sum over rows begins in a group and ends at most so far behind
#: it, and whoever gathers rows may read these in the place of rows that are not there.
ZEROS_BEHIND = 64


class Schedule(NamedTuple):
    """The tiles of a product.

    Attributes:
        tiles: int32 [most, 5]: group, begin and end of the group's rows, the tile's first row and first column. The
            first `ZEROS_BEHIND` rows past the last group are tiles of a group whose number is that of the groups. First
            rows are multiples of `ALIGNED`, the first one at or before the group's begin.
        count: int32 [1], tiles in use.
    """

    tiles: Int32[Array, "most 5"]
    count: Int32[Array, " 1"]


def schedule(
    group_sizes: Int32[Array, " X"], rows: int, tile_rows: int, column_tiles: int, tile_columns: int
) -> Schedule:
    """Cut the rows of every group, and the first ones past the last group, into tiles.

    Args:
        group_sizes: int32.
        rows: of all groups.
        tile_rows: rows of a tile.
        column_tiles: tiles beside each other.
        tile_columns: columns of a tile.
    """
    ends = jnp.minimum(jnp.cumsum(group_sizes), rows)
    ends = jnp.append(ends, jnp.minimum(ends[-1] + ZEROS_BEHIND, rows)).astype(jnp.int32)
    starts = jnp.pad(ends[:-1], (1, 0))
    first = starts // ALIGNED * ALIGNED
    row_tiles = jnp.where(ends > starts, (ends - first + tile_rows - 1) // tile_rows, 0)
    last = jnp.cumsum(row_tiles * column_tiles, dtype=jnp.int32)
    most = (rows + (ALIGNED - 1) * ends.shape[0]) // tile_rows + ends.shape[0]
    tile = jnp.arange(most * column_tiles, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(tile[:, None] >= last[None], axis=1, dtype=jnp.int32), ends.shape[0] - 1)
    own = tile - (last - row_tiles * column_tiles)[group]
    below = jnp.maximum(row_tiles[group], 1)
    row, column = first[group] + own % below * tile_rows, own // below * tile_columns
    return Schedule(jnp.stack([group, starts[group], ends[group], row, column], axis=1), last[-1:])
