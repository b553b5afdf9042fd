"""Tiles of a product over groups, as a table that the kernels' thread blocks walk through.

The number of tiles depends on the sizes of the groups and the table's length on their bound alone, so that nothing is
read back from the device. Tiles of a group are numbered down its rows first: thread blocks side by side read the same
columns of its matrix.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32


class Schedule(NamedTuple):
    """The tiles of a product.

    Attributes:
        tiles: int32 [most, 4]: group, first row, end of the group's rows, first column. Rows past the last group are
            tiles of a group whose number is that of the groups.
        count: int32 [1], tiles in use.
    """

    tiles: Int32[Array, "most 4"]
    count: Int32[Array, " 1"]


def schedule(
    group_sizes: Int32[Array, " X"], rows: int, tile_rows: int, column_tiles: int, tile_columns: int
) -> Schedule:
    """Cut the rows of every group, and those past the last one, into tiles.

    Args:
        group_sizes: int32.
        rows: of all groups.
        tile_rows: rows of a tile.
        column_tiles: tiles beside each other.
        tile_columns: columns of a tile.
    """
    ends = jnp.minimum(jnp.cumsum(group_sizes), rows)
    ends = jnp.append(ends, rows).astype(jnp.int32)
    starts = jnp.pad(ends[:-1], (1, 0))
    row_tiles = (ends - starts + tile_rows - 1) // tile_rows
    last = jnp.cumsum(row_tiles * column_tiles, dtype=jnp.int32)
    tile = jnp.arange((rows // tile_rows + ends.shape[0]) * column_tiles, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(tile[:, None] >= last[None], axis=1, dtype=jnp.int32), ends.shape[0] - 1)
    own = tile - (last - row_tiles * column_tiles)[group]
    below = jnp.maximum(row_tiles[group], 1)
    row = starts[group] + own % below * tile_rows
    return Schedule(jnp.stack([group, row, ends[group], own // below * tile_columns], axis=1), last[-1:])
