"""Memory of generation: the keys and values of a token, and how many tokens fit beside the weights."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from convert.model.config import ModelConfig
from fastjax.planning.memory import ALLOCATOR_BYTES


def cache_bytes_per_token(config: ModelConfig, dtype: DTypeLike) -> int:
    """Bytes of the keys and values of one token in all layers; one with a sliding window keeps every token too.

    Args:
        config: the model's.
        dtype: of the cache.
    """
    values = 2 * config.num_key_value_heads * config.head_dim
    return len(config.attention) * values * jnp.dtype(dtype).itemsize


class CacheRoom(NamedTuple):
    """The cache of generation on one device, beside a model's weights and nothing of its training.

    Attributes:
        weights: bytes of the weights, adapters included.
        dtype: of the cache.
        token_bytes: `cache_bytes_per_token`.
        tokens: of all rows together, prompts included, that fit.
    """

    weights: int
    dtype: str
    token_bytes: int
    tokens: int

    @classmethod
    def of(cls, config: ModelConfig, weights: int, dtype: DTypeLike, room: float) -> "CacheRoom":
        """The cache of a model.

        Args:
            config: the model's.
            weights: bytes of its arrays on the device.
            dtype: of the cache.
            room: bytes that the device has for all.
        """
        token = cache_bytes_per_token(config, dtype)
        left = max(0, int(room) - weights - ALLOCATOR_BYTES)
        return cls(weights, str(jnp.dtype(dtype)), token, left // token if token else 0)
