"""The places of examples in files and data sets, stored compactly.

An example's name nearly always ends in a number: `train.jsonl:12`, `org/name[train] row 7`. The prefix is stored once.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64


class Origins(NamedTuple):
    """The names of E examples.

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
