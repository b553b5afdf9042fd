"""The plain executor, layer after layer, is what every execution computes: in one pass, its gradients, and in steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.models import caching
from fastjax.models.context import Slots
from fastjax.models.executor import Executor
from tests.support import tiny

CONFIG = tiny.config(num_hidden_layers=4)


def decoders(**options):
    """The model's module as a run executes it, and the same with the plain executor."""
    model = tiny.model(tiny.shared_folder(num_hidden_layers=4), CONFIG, full_finetuning=True, **options)
    ours, plain = model.module(), model.module()
    plain.executor = Executor()
    return ours, plain


@pytest.mark.exhaustive("scan")
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_a_pass_and_its_gradients(layer_loop):
    tokens = jnp.asarray(np.random.default_rng(0).integers(5, 99, (2, 24)), jnp.int32)
    positions = jnp.concatenate([jnp.arange(14), jnp.arange(10)]).astype(jnp.int32)[None].repeat(2, 0)
    ids = jnp.asarray([[1] * 14 + [2] * 7 + [0] * 3] * 2, jnp.int32)

    def loss(decoder):
        graphdef, arrays = nnx.split(decoder)
        weigh = jnp.linspace(-1.0, 1.0, 48)[None, None] * (ids > 0)[:, :, None].astype(jnp.float32)

        @jax.jit
        def run(arrays):
            return jnp.sum(nnx.merge(graphdef, arrays)(tokens, positions, ids) * weigh)

        return jax.value_and_grad(run)(arrays)

    found, expected = (loss(decoder) for decoder in decoders(layer_loop=layer_loop, use_gradient_checkpointing="full"))
    # float32, another order of sums
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * max(1e-3, float(np.abs(other).max())))
    assert all(float(np.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(found[1]["layers"]))


@pytest.mark.exhaustive(
    by="test_a_pass_and_its_gradients, "
    "tests/fastjax/generation/test_serving.py::test_temperature_0_takes_the_likeliest_token_in_every_row"
)
def test_steps():
    tokens = jnp.asarray([[7, 9, 11, 13, 17]], jnp.int32)

    def hidden(decoder):
        states, found = caching.empty_states(decoder, 1, (4, 2)), []
        table, longest = jnp.asarray([[2, 1, 3]], jnp.int32), jnp.full((1, 1), 5, jnp.int32)
        for start, stop in ((0, 3), (3, 4), (4, 5)):
            positions = jnp.arange(start, stop, dtype=jnp.int32)[None]
            ones = jnp.ones_like(positions)
            pages, lengths = table[:, positions[0] // 2], jnp.asarray([stop], jnp.int32)
            slots = Slots(ones, 0 * ones, positions, pages, table, lengths, jnp.int32(0))
            out, states = caching.step(decoder, tokens[:, start:stop], positions, longest * ones, slots, states)
            found.append(out)
        return np.concatenate(found, axis=1)

    ours, plain = decoders()
    whole = plain(tokens, jnp.arange(5, dtype=jnp.int32)[None])
    for each in (hidden(ours), hidden(plain)):
        np.testing.assert_allclose(each, whole, rtol=0, atol=2e-5)  # float32
