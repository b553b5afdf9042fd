"""The cache of generation: bytes of a token, and the tokens that fit."""

import jax.numpy as jnp
import pytest

from convert.families.mapping import read_config
from fastjax.bench.presets import preset_config
from fastjax.planning.cache import CacheRoom, cache_bytes_per_token
from fastjax.planning.memory import ALLOCATOR_BYTES


@pytest.mark.parametrize(
    ("preset", "dtype", "expected"),
    [
        ("llama3-8b", jnp.bfloat16, 128 * 1024),
        ("llama3-8b", jnp.float8_e4m3fn, 64 * 1024),
        ("qwen3-30b-a3b", jnp.bfloat16, 96 * 1024),  # 48 layers of 4 key heads of 128
        ("gpt-oss-20b", jnp.bfloat16, 48 * 1024),  # of 24 layers of 8 key heads of 64 half have a window
    ],
)
def test_bytes_of_a_token(preset, dtype, expected):
    assert cache_bytes_per_token(read_config(preset_config(preset, None, "nf4")), dtype) == expected


def test_the_tokens_that_fit():
    config = read_config(preset_config("llama3-8b", None, "nf4"))
    room = ALLOCATOR_BYTES + 5 * 2**30 + 1000 * 2**17 + 2**17 - 1
    assert CacheRoom.of(config, 5 * 2**30, jnp.bfloat16, room) == (5 * 2**30, "bfloat16", 2**17, 1000)
    assert CacheRoom.of(config, 5 * 2**30, jnp.bfloat16, 2**30).tokens == 0
