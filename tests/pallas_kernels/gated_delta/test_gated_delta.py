"""The gated delta rule by chunks beside its recurrence in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta, reference

NAMES = ("q", "k", "v", "decay", "beta", "state")


def inputs(length, *, rows=2, key_heads=2, heads=4, size=16, value_size=8, decay=1.0, alike=0.0):
    """Operands by name in float64, and documents of any length.

    Args:
        length: tokens.
        rows: of the batch.
        key_heads: heads of queries and keys.
        heads: of values.
        size: of a key.
        value_size: of a value.
        decay: how fast the state is forgotten, on average.
        alike: from 0 to 1, how much the keys have in common.
    """
    rng = np.random.default_rng()
    draw = lambda *shape: rng.normal(size=shape)  # noqa: E731
    q, k = draw(rows, length, key_heads, size), draw(rows, length, key_heads, size)
    k = (1 - alike) * k + alike * draw(1, 1, key_heads, size)
    q, k = (array / np.linalg.norm(array, axis=-1, keepdims=True) for array in (q, k))
    gates = -decay * np.exp(draw(rows, length, heads)), 1 / (1 + np.exp(-draw(rows, length, heads)))
    arrays = (q, k, draw(rows, length, heads, value_size), *gates, draw(rows, heads, size, value_size))
    return dict(zip(NAMES, arrays, strict=True)), np.sort(rng.integers(1, 6, (rows, length)), axis=1).astype(np.int32)


def both(operation, operands, ids, factors, **options):
    """The output, the state after it, and the gradients of a weighed sum of both."""

    def loss(operands):
        found = operation(**operands, segment_ids=ids, scale=0.3, **options)
        of_state = jnp.asarray(factors[1], found[1].dtype)
        of_out = jnp.asarray(factors[0], found[1].dtype)
        return jnp.sum(found[0].astype(of_out.dtype) * of_out) + jnp.sum(found[1] * of_state), found

    return jax.jit(jax.grad(loss, has_aux=True))(operands)[::-1]


def compare(operands, ids, dtype, bound, **options):
    rng = np.random.default_rng()
    factors = [rng.normal(size=operands[name].shape) for name in ("v", "state")]
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(array, jnp.float64) for name, array in operands.items()}
        expected = both(reference.gated_delta, wide, ids, factors)
    given = {
        name: jnp.asarray(array, dtype if name in ("q", "k", "v") else jnp.float32) for name, array in operands.items()
    }
    found = both(functools.partial(gated_delta, **options), given, ids, factors)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        other = np.asarray(other)
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= bound * np.linalg.norm(other)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [64, 150])
def test_output_state_and_gradients_as_token_by_token(length, packed):
    operands, ids = inputs(length)
    compare(operands, ids if packed else None, jnp.float32, 1e-5)


@pytest.mark.parametrize("decay", [1e-3, 30.0])
def test_gates_near_one_and_near_zero_and_keys_alike(decay):
    operands, ids = inputs(256, decay=decay, alike=0.9)
    compare(operands, ids, jnp.float32, 3e-5)


def test_half_precision():
    operands, ids = inputs(192, size=32, value_size=32)
    operands |= {name: np.asarray(jnp.asarray(operands[name], jnp.bfloat16), np.float64) for name in ("q", "k", "v")}
    compare(operands, ids, jnp.bfloat16, 1.5e-2)


def test_rows_in_pieces_go_on_from_the_state():
    operands, _ = inputs(130)
    given = {name: jnp.asarray(array, jnp.float32) for name, array in operands.items()}
    whole, after = gated_delta(**given, scale=0.3)
    state, outs = given.pop("state"), []
    for piece in (slice(0, 70), slice(70, 129), slice(129, 130)):
        part = {name: array[:, piece] for name, array in given.items()}
        out, state = gated_delta(**part, state=state, scale=0.3)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=2e-5)
    np.testing.assert_allclose(state, after, atol=2e-5)


def test_what_does_not_fit_is_refused():
    operands, ids = inputs(8)
    given = {name: jnp.asarray(array, jnp.float32) for name, array in operands.items()}
    for wrong, message in (
        ({"beta": given["beta"][:, :, :3]}, r"beta: expected axes \(2, 8, 4\), got \(2, 8, 3\)"),
        ({"segment_ids": ids[:, 1:]}, r"segment_ids: expected axes \(2, 8\), got \(2, 7\)"),
        ({"v": given["v"].astype(jnp.bfloat16)}, "expected one dtype, got float32, float32, bfloat16"),
        ({"q": given["q"][..., :4]}, r"q: expected axes \(2, 8, 2, 16\), got \(2, 8, 2, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            gated_delta(**(given | wrong), scale=0.3)
    with pytest.raises(ValueError, match="multiple of the 2 key heads, got 3"):
        gated_delta(*(given[name][:, :, :3] if name in NAMES[2:5] else given[name] for name in NAMES[:5]), scale=0.3)
