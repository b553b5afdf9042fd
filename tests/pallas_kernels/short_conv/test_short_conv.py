"""Short convolutions beside float64 sums over the tokens, packed rows and rows alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.short_conv import reference, short_conv


def inputs(dtype, taps=4, rows=2, length=9, channels=5):
    rng = np.random.default_rng()
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (rows, length)), axis=1), jnp.int32)
    return draw(rows, length, channels), draw(channels, taps), draw(channels), draw(rows, taps - 1, channels), ids


@pytest.mark.parametrize(
    "bias, before, packed, activation", [(0, 0, 0, "silu"), (1, 1, 0, "silu"), (0, 1, 1, None), (1, 0, 1, "silu")]
)
def test_sums_and_gradients_as_token_by_token(bias, before, packed, activation):
    x, weight, offset, earlier, ids = inputs(jnp.float32)
    given = {"bias": offset if bias else None, "before": earlier if before else None}
    options = {"segment_ids": ids if packed else None, "activation": activation}
    operands = {"x": x, "weight": weight, **{name: array for name, array in given.items() if array is not None}}
    factors = np.random.default_rng().normal(size=x.shape)

    def loss(operation):
        def weighed(operands):
            found = operation(**operands, **options)
            return jnp.sum(found * jnp.asarray(factors, found.dtype))

        return weighed

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), operands)
        expected = reference.short_conv(**wide, **options), jax.grad(loss(reference.short_conv))(wide)
    found = short_conv(**operands, **options), jax.grad(loss(short_conv))(operands)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_half_precision_is_rounded_once():
    x, weight, *_, ids = inputs(jnp.bfloat16, length=40)
    found = short_conv(x, weight, segment_ids=ids)
    expected = reference.short_conv(x.astype(jnp.float32), weight.astype(jnp.float32), segment_ids=ids)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.bfloat16).astype(jnp.float32))


def test_what_does_not_fit_is_refused():
    x, weight, _, earlier, ids = inputs(jnp.float32)
    for given, message in (
        ({"bias": jnp.ones(3)}, r"bias: expected shape \(5,\), got \(3,\)"),
        ({"before": earlier[:, 1:]}, r"before: expected shape \(2, 3, 5\), got \(2, 2, 5\)"),
        ({"segment_ids": ids[:, 1:]}, r"segment_ids: expected shape \(2, 9\), got \(2, 8\)"),
        ({"activation": "gelu"}, "expected one of .* got 'gelu'"),
    ):
        with pytest.raises(ValueError, match=message):
            short_conv(x, weight, **given)
