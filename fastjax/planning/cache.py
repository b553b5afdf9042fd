"""Memory of generation: what layers keep of a token and of a row, and how many tokens fit beside the weights."""

import bisect
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from convert.model.config import ModelConfig
from convert.model.layers import Attention, LatentAttention
from fastjax.models.caching import PAGE
from fastjax.models.mixers.keys_values import ring_pages
from fastjax.planning.memory import ALLOCATOR_BYTES


def cache_bytes(config: ModelConfig, dtype: DTypeLike, rows: int, pages: tuple[int, int]) -> tuple[int, int]:
    """Bytes of a token in all layers that keep every token, and of all rows in those that keep a window or a state.

    Args:
        config: the model's.
        dtype: of the cache.
        rows: of the cache.
        pages: how many there are (page 0 is nobody's), and tokens of each.
    """
    rings = [ring_pages(layer.sliding_window, rows, pages) for layer in config.attention]
    itemsize = jnp.dtype(dtype).itemsize
    each = [_numbers(config, layer) * itemsize for layer in config.attention]
    whole = sum(size for size, ring in zip(each, rings, strict=True) if ring is None)
    windows = sum(size * (ring or 0) for size, ring in zip(each, rings, strict=True)) * pages[1]
    states = sum(4 * layer.matrices + layer.inputs * itemsize for layer in config.recurrent)
    return whole, rows * (windows + states)


def _numbers(config: ModelConfig, mixer: Attention | LatentAttention) -> int:
    """Numbers that a layer keeps of a token."""
    if isinstance(mixer, LatentAttention):
        return mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return 2 * config.num_key_value_heads * config.head_dim


def pages_that_fit(config: ModelConfig, dtype: DTypeLike, rows: int, most: tuple[int, int], room: int) -> int:
    """Pages of a cache that take no more than some bytes, with the rings and states of its rows; 0: not even one.

    Args:
        config: the model's.
        dtype: of the cache.
        rows: of the cache.
        most: pages that are asked for, and tokens of each.
        room: bytes.
    """

    def size(pages: int) -> int:
        token, rings = cache_bytes(config, dtype, rows, (pages + 1, most[1]))
        return pages * most[1] * token + rings

    return bisect.bisect_right(range(1, most[0] + 1), room, key=size)


class CacheRoom(NamedTuple):
    """The cache of generation on one device, beside a model's weights and nothing of its training.

    Attributes:
        weights: bytes of the weights, adapters included.
        dtype: of the cache.
        token_bytes: bytes of a token in the layers that keep every token.
        row_bytes: bytes of a row in those that keep a sliding window, or a state.
        tokens: of all rows together, prompts included, that fit in rows of a length.
    """

    weights: int
    dtype: str
    token_bytes: int
    row_bytes: int
    tokens: int

    @classmethod
    def of(cls, config: ModelConfig, weights: int, dtype: DTypeLike, room: float, length: int) -> "CacheRoom":
        """The cache of a model.

        Args:
            config: the model's.
            weights: bytes of its arrays on the device.
            dtype: of the cache.
            room: bytes that the device has for all.
            length: tokens of a row.
        """
        token, row = cache_bytes(config, dtype, 1, (-(-length // PAGE) + 1, PAGE))
        left = max(0, int(room) - weights - ALLOCATOR_BYTES)
        return cls(weights, str(jnp.dtype(dtype)), token, row, left * length // max(1, length * token + row))
