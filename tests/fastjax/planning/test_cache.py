"""The cache of generation: bytes of a token, of a row's windows, and the tokens that fit."""

import jax
import jax.numpy as jnp
import pytest

from convert.families.mapping import read_config
from fastjax.bench.presets import preset_config
from fastjax.models.caching import empty_states
from fastjax.planning.cache import CacheRoom, cache_bytes, pages_that_fit
from fastjax.planning.memory import ALLOCATOR_BYTES
from tests.support import tiny
from tests.support.families import CONFIGS

KIB = 1024


@pytest.mark.parametrize(
    ("preset", "dtype", "expected"),
    [
        ("llama3-8b", jnp.bfloat16, (128 * KIB, 0)),
        ("llama3-8b", jnp.float8_e4m3fn, (64 * KIB, 0)),
        ("glm-4.7-flash", jnp.bfloat16, (47 * 2 * (512 + 64), 0)),
        ("qwen3-30b-a3b", jnp.bfloat16, (96 * KIB, 0)),  # 48 layers of 4 key heads of 128
        # of 24 layers of 8 key heads of 64 half have a window of 128, two pages of 64
        ("gpt-oss-20b", jnp.bfloat16, (24 * KIB, 10 * 2 * 64 * 24 * KIB)),
    ],
)
def test_bytes_of_a_token_and_of_rings(preset, dtype, expected):
    config = read_config(preset_config(preset, None, "nf4"))
    assert cache_bytes(config, dtype, 10, (10 * 16 + 1, 64)) == expected
    token, rings = expected
    ring = rings // (2 * 64 * 10)  # a token's
    assert cache_bytes(config, dtype, 10, (10 * 2 + 1, 64)) == (token + ring, 0), "two pages a row: no ring is less"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("family", "count"), [*(("gemma3_text", count) for count in (2, 5, 8)), ("qwen3_5_text", 5)])
def test_it_is_what_the_states_take(tmp_path, rows, family, count):
    model = tiny.model(tmp_path, CONFIGS[family])
    states = jax.eval_shape(lambda: empty_states(model.value.module(), rows, (count, 4)))
    taken = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states))
    token, rings = cache_bytes(model.value.config, jnp.float32, rows, (count, 4))
    assert taken == token * count * 4 + rings
    assert bool(rings) == (rows * 2 < count - 1 or family == "qwen3_5_text")


def test_the_tokens_that_fit():
    config = read_config(preset_config("llama3-8b", None, "nf4"))
    room = ALLOCATOR_BYTES + 5 * 2**30 + 1000 * 2**17 + 2**17 - 1
    assert CacheRoom.of(config, 5 * 2**30, jnp.bfloat16, room, 512) == (5 * 2**30, "bfloat16", 2**17, 0, 1000)
    assert CacheRoom.of(config, 5 * 2**30, jnp.bfloat16, 2**30, 512).tokens == 0
    windows = read_config(preset_config("gpt-oss-20b", None, "nf4"))
    row = 4096 * 24 * KIB + 2 * 64 * 24 * KIB
    found = CacheRoom.of(windows, 0, jnp.bfloat16, ALLOCATOR_BYTES + 7 * row, 4096)
    assert found == (0, "bfloat16", 24 * KIB, 2 * 64 * 24 * KIB, 7 * 4096)


def test_the_pages_that_fit():
    config = read_config(preset_config("gpt-oss-20b", None, "nf4"))
    page, rings = 64 * 24 * KIB, 10 * 2 * 64 * 24 * KIB
    fit = [pages_that_fit(config, jnp.bfloat16, 10, (99, 64), room) for room in (0, 9 * 2 * page, rings + 50 * page)]
    assert fit == [0, 9, 50]
    assert pages_that_fit(config, jnp.bfloat16, 10, (99, 64), rings + 50 * page - 1) == 49
    assert pages_that_fit(config, jnp.bfloat16, 10, (99, 64), 2**60) == 99
