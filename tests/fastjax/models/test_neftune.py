"""NEFTune: uniform noise of the size that the paper gives, from the key alone, and none in evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.models.neftune import noisy_embeddings
from tests.support import tiny

LENGTHS, WIDTH, EMBED = (300, 80, 20), 512, 64
ALPHA = 7.0


def segments():
    return jnp.asarray(tiny.rows([[np.zeros(n, np.int32) for n in LENGTHS], [np.zeros(500, np.int32)]], WIDTH)[2])


def noise(segment_ids, key=0, dtype=jnp.float32):
    x = jnp.zeros((2, WIDTH, EMBED), dtype)
    return np.asarray(noisy_embeddings(x, segment_ids, jax.random.key(key), ALPHA), np.float64)


@pytest.mark.parametrize("packed", [True, False])
def test_noise_is_uniform_within_the_bound_of_each_document(packed):
    ids = segments()
    found = noise(ids if packed else None)
    parts = [(found[0, np.asarray(ids[0]) == n + 1], length) for n, length in enumerate(LENGTHS)]
    for part, length in [*parts, (found[1, :500], 500)] if packed else [(found[0], WIDTH), (found[1], WIDTH)]:
        bound = ALPHA / np.sqrt(length * EMBED)
        assert 0.99 * bound < np.abs(part).max() <= bound * (1 + 1e-6)
        error = 1 / np.sqrt(part.size)
        assert abs(part.mean()) < 4 * bound / np.sqrt(3) * error
        # standard deviation bound/√3; that of a uniform sample's has a relative error of √(1/5n)
        assert abs(part.std() / (bound / np.sqrt(3)) - 1) < 4 * np.sqrt(0.2) * error
    if packed:
        assert not found[np.asarray(ids) == 0].any(), "padding stays as it is"


def test_noise_follows_from_the_key():
    assert np.array_equal(noise(segments()), noise(segments()))
    assert np.abs(noise(segments(), key=1) - noise(segments())).max() > 0.05


def test_a_model_has_noise_only_with_a_key():
    model = tiny.model(tiny.shared_folder(), tiny.CONFIG)
    tokens, _, ids, positions = (jnp.asarray(a) for a in tiny.rows([tiny.documents(tiny.CONFIG, (17, 9))], 32))
    decoder = model.module()

    def run(key, alpha):
        return np.asarray(decoder(tokens, positions, ids, key=key, neftune_noise_alpha=alpha))

    plain = run(None, None)
    assert np.array_equal(run(None, ALPHA), plain), "evaluation"
    assert np.array_equal(run(jax.random.key(0), None), plain) and np.array_equal(run(jax.random.key(0), 0.0), plain)
    noisy = run(jax.random.key(0), ALPHA)
    assert np.abs(noisy - plain).max() > 0.01 and np.array_equal(noisy, run(jax.random.key(0), ALPHA))
