"""Where examples came from, small enough to keep for every one of them.

An example's name ends in a number nearly always: `train.jsonl:12`, `org/name[train] row 7`. What comes before it is
kept once.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64


class Origins(NamedTuple):
    """The names of E examples.

    Attributes:
        places: What names begin with.
        place: For each example, which of these.
        number: The number that its name ends in; -1: none.
    """

    places: tuple[str, ...]
    place: Int32[np.ndarray, " E"]
    number: Int64[np.ndarray, " E"]

    @classmethod
    def of(cls, names: Iterable[str]) -> "Origins":
        """Take names apart.

        Args:
            names: A name an example.

        Returns:
            The same, small.
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

    @classmethod
    def concatenate(cls, parts: Sequence["Origins"]) -> "Origins":
        """Put parts one behind the other.

        Args:
            parts: The parts, in order.

        Returns:
            All names.
        """
        places: dict[str, int] = {}
        renamed = []
        for part in parts:
            new = [places.setdefault(name, len(places)) for name in part.places]
            renamed.append(np.asarray(new, np.int32)[part.place])
        return cls(
            tuple(places),
            np.concatenate([*renamed, np.zeros(0, np.int32)]),
            np.concatenate([*(part.number for part in parts), np.zeros(0, np.int64)]),
        )

    def name(self, example: int) -> str:
        """The name of an example.

        Args:
            example: Its index.

        Returns:
            The name as it was given.
        """
        number = int(self.number[example])
        return self.places[self.place[example]] + (str(number) if number >= 0 else "")

    def listed(self, examples: Iterable[int]) -> str:
        """The names of examples, of those with the same beginning only the number after the first.

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
