"""An embedding's adapter against the plain table W + s·(B·A)ᵀ: values and gradients, with and without DoRA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.lora import reference
from fastjax.lora.params import LoraEmbedding
from tests.fastjax.lora.conftest import Maker

VOCABULARY, WIDTH, RANK = 40, 24, 4


@pytest.mark.parametrize("dora", [False, True])
def test_equals_the_plain_table(dora):
    maker = Maker()
    table, a, b = maker.normal(VOCABULARY, WIDTH), maker.normal(RANK, VOCABULARY), maker.normal(WIDTH, RANK)
    magnitude = 1.0 + jnp.abs(maker.normal(WIDTH)) if dora else None
    tokens = jnp.asarray(maker.rng.integers(0, VOCABULARY, (2, 9)), jnp.int32)
    graphdef, state = nnx.split(LoraEmbedding(a, b, magnitude, scaling=1.5))
    weights = maker.normal(2, 9, WIDTH)

    def unit(trained):
        adapter = nnx.merge(graphdef, trained)
        return jnp.sum(weights * adapter(tokens, jnp.take(table, tokens, axis=0), table))

    def plain(trained):
        return jnp.sum(weights * reference.embed(nnx.merge(graphdef, trained), tokens, table, jnp.float32))

    found, expected = (jax.value_and_grad(f)(nnx.to_pure_dict(state)) for f in (unit, plain))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # float32, sums of a few dozen products
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6 * np.abs(theirs).max())
