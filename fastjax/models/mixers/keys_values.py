"""Keys and values of the tokens so far, as attention keeps them: in pages that a table gives, or in a ring a row."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fastjax.models.context import Slots


class Seen(NamedTuple):
    """Keys and values that the new tokens of rows may see, by row one after another, the new ones last.

    Attributes:
        keys: in the dtype of the new ones.
        values: in the dtype of the new ones.
        filled: 1 where there is a token; elsewhere keys and values may be anything finite.
        offset: place of each row's first new token among them.
    """

    keys: Float[Array, "B T K D"]
    values: Float[Array, "B T K D"]
    filled: Int[Array, "B T"]
    offset: int | Int[Array, "B"]


def written_pages(held: Float[Array, "L N K P D"], new: Float[Array, "B S K D"], slots: Slots) -> Array:
    """Pages with the new tokens in their places.

    Args:
        held: the pages.
        new: what they are to hold of the new tokens.
        slots: of these.
    """
    pages, places = slots.pages.reshape(-1), slots.positions.reshape(-1) % held.shape[3]
    new = new.astype(held.dtype).reshape(-1, *new.shape[2:])
    return held.at[slots.layer, pages, :, places].set(new, mode="promise_in_bounds")


def filled_places(slots: Slots, page: int) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """`Seen.filled` and `Seen.offset` of rows whose pages are gathered.

    Args:
        slots: of the new tokens.
        page: tokens of a page.
    """
    filled = (jnp.arange(slots.table.shape[1] * page)[None] < slots.lengths[:, None]).astype(jnp.int32)
    return filled, slots.lengths - jnp.sum(slots.tokens, axis=1)


def gathered_pages(
    held: Float[Array, "L N K P D"], dtype: DTypeLike, filled: Int[Array, "B T"], slots: Slots
) -> Float[Array, "B T K D"]:
    """The contents of each row's pages, one after another.

    Args:
        held: the pages.
        dtype: of the result.
        filled: as of `filled_places`.
        slots: of the new tokens.
    """
    table = jnp.where(filled[:, :: held.shape[3]] > 0, slots.table, 0)
    taken = jnp.moveaxis(held[slots.layer, table], 2, 3)
    return taken.reshape(table.shape[0], -1, *taken.shape[3:]).astype(dtype)


class KeysValues(NamedTuple):
    """Keys and values of all tokens, in pages that rows may share."""

    keys: Float[Array, "L N K P D"]
    values: Float[Array, "L N K P D"]

    PACKS = True
    AXES = (("layers", "pages", "key_heads", "page", "head_dim"),) * 2

    def written(self, keys: Float[Array, "B S K D"], values: Float[Array, "B S K D"], slots: Slots) -> "KeysValues":
        """With the new tokens in their places."""
        return KeysValues(written_pages(self.keys, keys, slots), written_pages(self.values, values, slots))

    def seen(
        self, keys: Float[Array, "B S K D"], values: Float[Array, "B S K D"], slots: Slots
    ) -> tuple["KeysValues", Seen]:
        """The state with the new tokens, and what they may see."""
        state = self.written(keys, values, slots)
        filled, offset = filled_places(slots, self.keys.shape[3])
        keys, values = (gathered_pages(held, keys.dtype, filled, slots) for held in state)
        return state, Seen(keys, values, filled, offset)

    def paged(self, slots: Slots) -> tuple[Float[Array, "L N K P D"], Float[Array, "L N K P D"], Int[Array, "B M"]]:
        """Keys, values and table for `paged_attention`."""
        return self.keys, self.values, slots.table


class Rings(NamedTuple):
    """Keys and values of the last tokens of each row, as many as a sliding window sees, in a ring of W pages.

    Page i of a row's tokens is page i % W of its ring. The window's first page and its last may be one in the ring: the
    tokens that the window sees of each have other places in it.
    """

    keys: Float[Array, "L R W K P D"]
    values: Float[Array, "L R W K P D"]

    PACKS = True
    AXES = (("layers", "rows", "ring", "key_heads", "page", "head_dim"),) * 2

    def written(self, keys: Float[Array, "B S K D"], values: Float[Array, "B S K D"], slots: Slots) -> "Rings":
        """With the new tokens in their places: of each row the last ones, of which a ring holds so many."""
        count, ring, _, page = self.keys.shape[1:5]
        rows, positions = last_of_rows(slots.rows, ring * page, count).reshape(-1), slots.positions.reshape(-1)

        def with_new(held: Array, new: Array) -> Array:
            new = new.astype(held.dtype).reshape(-1, *new.shape[2:])
            at = held.at[slots.layer, rows, positions // page % ring, :, positions % page]
            return at.set(new, mode="drop")

        return Rings(with_new(self.keys, keys), with_new(self.values, values))

    def seen(
        self, keys: Float[Array, "B S K D"], values: Float[Array, "B S K D"], slots: Slots
    ) -> tuple["Rings", Seen]:
        """The state with the new tokens, and what they may see: the ring as it was before them, and themselves."""
        ring, _, page = self.keys.shape[2:5]
        before = slots.lengths - jnp.sum(slots.tokens, axis=1)
        positions = before[:, None] + jnp.arange(-ring * page, 0, dtype=jnp.int32)[None]

        def gathered(held: Array, new: Array) -> Array:
            at = held.at[slots.layer, slots.rows[:, :1], positions // page % ring, :, positions % page]
            return jnp.concatenate([at.get(mode="clip").astype(new.dtype), new], axis=1)

        filled = jnp.concatenate([(positions >= 0).astype(jnp.int32), slots.tokens], axis=1)
        seen = Seen(gathered(self.keys, keys), gathered(self.values, values), filled, ring * page)
        return self.written(keys, values, slots), seen

    def paged(self, slots: Slots) -> tuple[Float[Array, "L N K P D"], Float[Array, "L N K P D"], Int[Array, "B M"]]:
        """Keys, values and table for `paged_attention`, which reads the pages of the window alone."""
        layers, rows, ring, *page = self.keys.shape
        table = slots.rows[:, :1] * ring + (jnp.arange(slots.table.shape[1], dtype=jnp.int32) % ring)[None]
        return self.keys.reshape(layers, rows * ring, *page), self.values.reshape(layers, rows * ring, *page), table


def last_of_rows(rows: Int[Array, "B S"], held: int, none: int) -> Int[Array, "B S"]:
    """The rows of new tokens, with `none` for those that come before as many others of theirs as are held.

    Args:
        rows: as of `Slots`.
        held: tokens of a row that are held.
        none: a number that is no row's.
    """
    if rows.shape[1] <= held:
        return rows
    return jnp.where(jnp.pad(rows[:, held:] == rows[:, :-held], ((0, 0), (0, held))), none, rows)


def ring_pages(window: int | None, rows: int, pages: tuple[int, int]) -> int | None:
    """Pages of a row's ring, which hold the tokens of a window; None: there is none, or it saves no memory.

    Args:
        window: tokens that a query sees, itself included; None: all.
        rows: of the state.
        pages: as of `Mixer.init`.
    """
    if window is None:
        return None
    count, page = pages
    ring = -(-window // page)
    return ring if rows * ring < count - 1 else None


def empty_keys_values(
    layers: int, rows: int, pages: tuple[int, int], heads: tuple[int, int], window: int | None, dtype: DTypeLike
) -> KeysValues | Rings:
    """Keys and values of no token.

    Args:
        layers: that share the state.
        rows: of the state.
        pages: as of `Mixer.init`.
        heads: key heads, and their size.
        window: tokens that a query sees, itself included; None: all.
        dtype: of both.
    """
    ring, (key_heads, size) = ring_pages(window, rows, pages), heads
    if ring is None:
        shape = (layers, pages[0], key_heads, pages[1], size)
        return KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    shape = (layers, rows, ring, key_heads, pages[1], size)
    return Rings(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
