"""Mixtures of data sets.

Without weights data sets are concatenated. With weights, each data set's share of the examples is its weight over the
sum of the weights, exact up to rounding. An epoch ends either before any data set repeats an example (of the others it
has a random part, the same in every epoch), or once every data set is used up (the others repeat: whole as often as
that goes, and a random part).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from fastjax.data.settings import Exhaustion
from fastjax.errors import ConfigError


def choose(
    sizes: Sequence[int], weights: Sequence[float | None], ends: Exhaustion, seed: int
) -> list[Int64[np.ndarray, " _"]]:
    """Choose the examples of an epoch.

    Args:
        sizes: Examples in each data set.
        weights: The weight of each; None in all: every example once.
        ends: The end of the epoch.
        seed: Seed of the random parts.

    Returns:
        For each data set the indices of its examples, ascending, with repetitions.
    """
    if not any(weights):
        return [np.arange(size) for size in sizes]
    known = np.array([weight or 0.0 for weight in weights])
    length = np.array(sizes) / known
    scale = length.min() if ends == "first_exhausted" else length.max()
    chosen = []
    for index, (size, weight) in enumerate(zip(sizes, known, strict=True)):
        times, rest = divmod(round(scale * weight), size)
        part = np.random.default_rng((seed, index)).permutation(size)[:rest]
        chosen.append(np.sort(np.concatenate([np.tile(np.arange(size), times), part])))
    return chosen


def split_off(sizes: Sequence[int], held_out: float) -> list[Int64[np.ndarray, " _"]]:
    """Choose the examples that are held out, by chance, of each data set its part.

    Args:
        sizes: Examples in each data set.
        held_out: Their number, or their share below 1.

    Returns:
        For each data set the indices of those held out, ascending; the same ones each time.

    Raises:
        ConfigError: Nothing would be held out, or nothing left.
    """
    total = sum(sizes)
    count = round(held_out * total) if held_out < 1 else int(held_out)
    if not 0 < count < total:
        raise ConfigError(
            f"data.val_set_size: expected at least 1 and fewer than the {total:,} examples, got {held_out:g}"
        )
    parts = count / total * np.array(sizes)
    counts = parts.astype(np.int64)
    counts[np.argsort(counts - parts, kind="stable")[: count - counts.sum()]] += 1
    return [
        np.sort(np.random.default_rng((0, index)).permutation(size)[:part])
        for index, (size, part) in enumerate(zip(sizes, counts.tolist(), strict=True))
    ]


def next_source(weights: Sequence[float], drawn: Sequence[int]) -> int:
    """The data set of a stream's next example: the one furthest behind its share.

    Args:
        weights: The weight of each, all positive.
        drawn: Examples taken from each so far.

    Returns:
        Its index.
    """
    total = sum(drawn) + 1
    share = sum(weights)
    return int(np.argmax([weight / share * total - taken for weight, taken in zip(weights, drawn, strict=True)]))
