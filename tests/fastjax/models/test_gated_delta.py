"""The state of Gated DeltaNet behind rows of different lengths."""

import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.models.mixers.gated_delta import _last_inputs


@pytest.mark.parametrize("length", [2, 5])
def test_padding_is_none_of_the_last_inputs(length):
    rng = np.random.default_rng()
    before, new = rng.normal(size=(length + 1, 3, 4)), rng.normal(size=(length + 1, length, 4))
    counts = np.arange(length + 1)
    tokens = (np.arange(length)[None] < counts[:, None]).astype(np.int32)
    found = _last_inputs(*(jnp.asarray(array, jnp.float32) for array in (before, new)), jnp.asarray(tokens))
    expected = [np.concatenate([old, row[:count]])[-3:] for old, row, count in zip(before, new, counts, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
