"""Dropout of attention weights by a counter-based generator: the same bits in every pass and implementation.

Threefry-2x32 with 13 rounds, the fewest that pass BigCrush (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as
easy as 1, 2, 3, SC 2011, table 2). The counter is the weight's place (query, key), the key is the call's seed with the
head added to it, so forward and backward passes, blocks of any size and every implementation agree on each bit. Only
32-bit additions, shifts and exclusive ors: the same code runs in XLA and in the kernels.
"""

import jax.numpy as jnp
from jax import Array, lax

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 13
_PARITY = 0x1BD11BDA


def threshold(rate: float) -> int:
    """A weight is kept where its 32 bits are at least this: the rate in units of 2⁻³²."""
    return min(round(rate * 2**32), 2**32 - 1)


def random_bits(seed: tuple[Array, Array], head: Array, queries: Array, keys: Array) -> Array:
    """32 random bits for each weight.

    Args:
        seed: two uint32 numbers.
        head: uint32, batch index · H + query head; of a shape that broadcasts with the others.
        queries: uint32, the index of the query in its row.
        keys: uint32, the index of the key in its row.

    Returns:
        uint32 of the common shape.
    """
    key = (seed[0] + head, seed[1])
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = queries + schedule[0], keys + schedule[1]
    for index in range(_ROUNDS):
        x = x + y
        y = x ^ _rotated(y, _ROTATIONS[index % 8])
        if index % 4 == 3:
            turn = index // 4 + 1
            x = x + schedule[turn % 3]
            y = y + (schedule[(turn + 1) % 3] + jnp.uint32(turn))
    return x


def _rotated(word: Array, bits: int) -> Array:
    return lax.shift_left(word, jnp.uint32(bits)) | lax.shift_right_logical(word, jnp.uint32(32 - bits))
