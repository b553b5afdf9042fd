"""The lengths of a run's batches: each is as long as its longest row, rounded up to one of few.

What is behind the longest row of a batch is padding in all of them, and a step would compute it. Every length is a
program to compile, so the lengths are powers of two and 3/2 of them, of which a run keeps those that pay: the fewer the
steps that a length serves, and the nearer the next one, the less it saves.
"""

import numpy as np
from jaxtyping import Int

#: Tokens of the shortest batch.
SHORTEST = 32
#: Lengths of a run, at most; and of streamed data, whose rows are not known before.
MOST, MOST_STREAMED = 8, 4
#: Compiling a program takes about as long as so many steps of the longest batch (on an H100 8 to 40 s, and a second).
COMPILING = 10


def ladder(row_length: int, multiple: int = 1) -> list[int]:
    """All lengths that a batch may have, ascending: powers of two and 3/2 of them, and that of a row.

    Args:
        row_length: tokens of a row.
        multiple: divides every length, as it does `row_length`: the parts that devices cut a row into.
    """
    powers = [SHORTEST << n for n in range(row_length.bit_length())]
    rungs = {-(-length // multiple) * multiple for power in powers for length in (power, power * 3 // 2)}
    return sorted({rung for rung in rungs if rung < row_length} | {row_length})


def streamed_lengths(row_length: int, multiple: int = 1) -> tuple[int, ...]:
    """The lengths of batches whose rows are not known before: of `ladder`, each about half of the next.

    Args:
        row_length: tokens of a row.
        multiple: as of `ladder`.
    """
    return tuple(reversed(ladder(row_length, multiple)[::-2][:MOST_STREAMED]))


def chosen_lengths(
    longest: Int[np.ndarray, " N"], row_length: int, multiple: int = 1, before: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The lengths of a run's batches, ascending.

    Args:
        longest: tokens of each step's longest row.
        row_length: tokens of a row.
        multiple: as of `ladder`.
        before: lengths that the run had before it was interrupted, which it keeps.

    Returns:
        Of `ladder`: those that save more tokens than compiling them costs, the longest in any case.
    """
    rungs = np.array(ladder(row_length, multiple))
    counts = np.bincount(np.searchsorted(rungs, longest), minlength=len(rungs)).tolist()
    used = [(int(rung), count) for rung, count in zip(rungs, counts, strict=True) if count] or [(int(rungs[0]), 0)]
    if before and set(before) <= set(rungs.tolist()):
        return before if before[-1] >= used[-1][0] else (*before, used[-1][0])
    while len(used) > 1:
        saved = [count * (after - rung) for (rung, count), (after, _) in zip(used, used[1:], strict=False)]
        least = int(np.argmin(saved))
        if len(used) <= MOST and saved[least] >= COMPILING * used[-1][0]:
            break
        used[least : least + 2] = [(used[least + 1][0], used[least][1] + used[least + 1][1])]
    return tuple(rung for rung, _ in used)
