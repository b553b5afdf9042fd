"""Documents into rows of a fixed length.

Rows are filled by best-fit decreasing: the documents from the longest to the shortest, each into the fullest row with
room for it. Room is counted in whole tokens, so there is one stack of rows for each amount of room, and the smallest
sufficient amount is the lowest set bit of an integer: a million documents take seconds. (Ding et al., "Fewer
Truncations Improve Language Modeling", arXiv:2404.10830, use a segment tree for this bit.)

The assignment of documents to rows is computed once; a row's arrays are built on access.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64, Shaped

from fastjax.data.documents import IGNORE, Documents, spans


class RowArrays(NamedTuple):
    """Input rows of the model.

    Attributes:
        tokens: Token ids; 0 in padding.
        targets: The token that follows each where it is learnt, else -100.
        segment_ids: The document of each token within its row, from 1; 0 is padding.
        positions: The place of each token within its document; 0 in padding.
    """

    tokens: Int32[np.ndarray, "B S"]
    targets: Int32[np.ndarray, "B S"]
    segment_ids: Int32[np.ndarray, "B S"]
    positions: Int32[np.ndarray, "B S"]


class Origins(NamedTuple):
    """The names of E examples, stored compactly.

    A name nearly always ends in a number: `train.jsonl:12`, `org/name[train] row 7`. The prefix is stored once.

    Attributes:
        places: Prefixes of names.
        place: Each example's prefix, by index.
        number: The number that ends its name; -1: none.
    """

    places: tuple[str, ...]
    place: Int32[np.ndarray, " E"]
    number: Int64[np.ndarray, " E"]

    @classmethod
    def of(cls, names: Iterable[str]) -> "Origins":
        """Split names into prefixes and numbers.

        Args:
            names: One an example.
        """
        places: dict[str, int] = {}
        place, number = [], []
        for name in names:
            head = name.rstrip("0123456789")
            tail = name[len(head) :]
            if not tail or (tail[0] == "0" and len(tail) > 1) or len(tail) > 18:
                head, tail = name, "-1"
            place.append(places.setdefault(head, len(places)))
            number.append(int(tail))
        return cls(tuple(places), np.asarray(place, np.int32), np.asarray(number, np.int64))

    def name(self, example: int) -> str:
        """The name of an example.

        Args:
            example: The example's index.
        """
        number = int(self.number[example])
        return self.places[self.place[example]] + (str(number) if number >= 0 else "")

    def listed(self, examples: Iterable[int]) -> str:
        """The names of examples, with each prefix written once in a sequence.

        Args:
            examples: Their indices.

        Returns:
            For instance "train.jsonl:12, 95, more.jsonl:4".
        """
        parts, before = [], None
        for example in examples:
            place, number = int(self.place[example]), int(self.number[example])
            parts.append(str(number) if place == before and number >= 0 else self.name(example))
            before = place
        return ", ".join(parts)


class PackedRows(NamedTuple):
    """Documents and their rows; row r has the documents `order[offsets[r] : offsets[r + 1]]`.

    Attributes:
        documents: The documents.
        order: Document indices, row after row, with the repetitions of an epoch.
        offsets: The start of each row in `order`, and the total at the end.
        row_length: Tokens in a row.
        origins: The names of the examples; None: unknown.
        fields: Further numbers of each document, by name: one of `documents` each.
    """

    documents: Documents
    order: Int64[np.ndarray, " D"]
    offsets: Int64[np.ndarray, " R_plus_1"]
    row_length: int
    origins: Origins | None = None
    fields: Mapping[str, Shaped[np.ndarray, " _"]] = {}

    @property
    def documents_per_row(self) -> int:
        """Documents in the row that has the most."""
        return int(np.diff(self.offsets).max(initial=1))

    @property
    def lengths(self) -> Int64[np.ndarray, " R"]:
        """Tokens of each row, without padding."""
        return np.diff(np.concatenate([[0], np.cumsum(self.documents.lengths[self.order])])[self.offsets])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def members(self, row: int) -> list[int]:
        """The documents of a row, by index.

        Args:
            row: The row's number; none are in one outside [0, len(self)).
        """
        if not 0 <= row < len(self):
            return []
        return self.order[self.offsets[row] : self.offsets[row + 1]].tolist()

    def rows(self, indices: Sequence[int] | Int[np.ndarray, " B"]) -> RowArrays:
        """Build the arrays of rows.

        Args:
            indices: Row numbers; one outside [0, len(self)) is a row of padding.

        Returns:
            Arrays [len(indices), row_length].
        """
        shape = (len(indices), self.row_length)
        tokens, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(3))
        targets = np.full(shape, IGNORE, np.int32)
        for row, index in enumerate(indices):
            start = 0
            for segment, document in enumerate(self.members(int(index)), start=1):
                first, last = self.documents.offsets[document : document + 2]
                end = start + int(last - first)
                tokens[row, start:end] = self.documents.tokens[first:last]
                targets[row, start:end] = self.documents.targets[first:last]
                segment_ids[row, start:end] = segment
                positions[row, start:end] = np.arange(end - start, dtype=np.int32)
                start = end
        return RowArrays(tokens, targets, segment_ids, positions)

    def describe(self, row: int, most: int = 8) -> str:
        """Name the places of a row's examples, for people.

        Args:
            row: The row's number.
            most: Names at most.

        Returns:
            Their places, such as "train.jsonl:12, 95 and 3 more".
        """
        examples = dict.fromkeys(int(self.documents.examples[document]) for document in self.members(row))
        shown = list(examples)[:most]
        names = ", ".join(f"example {n}" for n in shown) if self.origins is None else self.origins.listed(shown)
        return names + (f" and {len(examples) - most} more" if len(examples) > most else "")


def pack_documents(
    documents: Documents,
    row_length: int,
    *,
    packing: bool = True,
    starts: Int64[np.ndarray, " G_plus_1"] | None = None,
    chosen: Int64[np.ndarray, " _"] | None = None,
    origins: Origins | None = None,
    fields: Mapping[str, Shaped[np.ndarray, " D"]] = {},
) -> PackedRows:
    """Assign documents, or groups of them that stay together, to rows.

    Args:
        documents: The documents; none, or no group, is longer than `row_length`.
        row_length: Tokens in a row.
        packing: Groups share rows; otherwise each has a padded row of its own.
        starts: The first document of each group, and their number at the end; None: each document is one.
        chosen: The groups of an epoch, with repetitions; None: each once.
        origins: The names of the examples.
        fields: Further numbers of each document, by name.

    Returns:
        The rows, in the order of their first groups.
    """
    starts = np.arange(len(documents) + 1) if starts is None else starts
    chosen = np.arange(len(starts) - 1) if chosen is None else chosen
    lengths = np.diff(documents.offsets[starts])[chosen]
    bins = best_fit(lengths, row_length) if packing else [[group] for group in range(len(chosen))]
    groups = chosen[np.fromiter((item for members in bins for item in members), np.int64, len(chosen))]
    sizes = np.diff(starts)[groups]
    offsets = np.concatenate([[0], np.cumsum(sizes)])[np.cumsum([0, *map(len, bins)], dtype=np.int64)]
    return PackedRows(documents, spans(starts[groups], sizes), offsets, row_length, origins, fields)


def best_fit(lengths: Sequence[int] | Int[np.ndarray, " D"], capacity: int) -> list[list[int]]:
    """Distribute items over bins by best-fit decreasing.

    Args:
        lengths: The size of each item, from 1 to `capacity`.
        capacity: The size of a bin.

    Returns:
        The items in each bin, ascending; the bins by their first item.

    Raises:
        ValueError: An item does not fit a bin.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and not 1 <= sizes.min() <= sizes.max() <= capacity:
        raise ValueError(f"lengths must be from 1 to {capacity}, got {sizes.min()} to {sizes.max()}")
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit n is set while some bin has room for exactly n
    # A stable order, so that equal data sets give equal rows.
    descending = np.argsort(-sizes, kind="stable")
    for item, length in zip(descending.tolist(), sizes[descending].tolist(), strict=True):
        sufficient = rooms >> length
        if sufficient:
            room = length + (sufficient & -sufficient).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            bins[chosen].append(item)
        else:
            room, chosen = capacity, len(bins)
            bins.append([item])
        left = room - length
        if left:
            by_room[left].append(chosen)
            rooms |= 1 << left
    return sorted(sorted(members) for members in bins)
