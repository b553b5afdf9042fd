"""Short convolutions beside float64 sums over the tokens, packed rows and rows alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.short_conv import reference, short_conv, short_conv_token, token
from tests.support.aot import AOT, needs_cuda_plugin


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


def token_of(dtype, *, heads=5, size=32, units=3, rows=4, taps=4):
    """Arguments of a token of some rows in one of two layers, all other inputs poisoned; the first token has no row."""
    rng, channels = np.random.default_rng(), heads * size
    places = rng.permutation(rows + 1).astype(np.int32)[:rows]
    places[0] = rows + 1
    inputs = np.full((2, rows + 1, taps - 1, channels), np.nan)
    inputs[1, places[1:]] = rng.normal(size=(rows - 1, taps - 1, channels))
    x, weight = rng.normal(size=(rows, 1, channels + 7)), rng.normal(size=(channels, taps))
    arrays = (jnp.asarray(array, dtype) for array in (x, weight, inputs))
    return (*arrays, 1, jnp.asarray(places)), {"activation": "silu", "units": (units, size), "eps": 1e-6}


def close_to_sums(found, arguments, options, bound):
    """Sums within a bound of their largest; the inputs exactly."""
    x, weight, inputs, layer, rows = (np.asarray(array, np.float64) for array in arguments)
    layer, (first, *rows), (count, size) = int(layer), rows.astype(int), options["units"]
    every = np.concatenate([inputs[layer, rows], x[1:, :, : weight.shape[0]]], axis=1)
    total = np.einsum("btc,ct->bc", every, weight)
    heads = (total / (1 + np.exp(-total))).reshape(len(rows), -1, size)
    heads[:, :count] /= np.sqrt(np.sum(heads[:, :count] ** 2, axis=-1, keepdims=True) + options["eps"])
    y, after = (np.asarray(array, np.float64) for array in found)
    assert first == inputs.shape[1] and not y[0].any()
    one = y[1:].reshape(heads.shape)
    for part in (slice(count), slice(count, None)):
        assert np.abs(one[:, part] - heads[:, part]).max() <= bound * np.abs(heads[:, part]).max()
    inputs[layer, rows] = every[:, 1:]
    np.testing.assert_array_equal(after, inputs)


def test_a_token_in_its_layers_inputs():
    arguments, options = token_of(jnp.float32)
    close_to_sums(short_conv_token(*arguments, **options), arguments, options, 1e-6)
    *first, layer, rows = arguments
    found = token.in_triton(*first, jnp.int32(layer), rows, *options.values(), interpret=True)
    close_to_sums(found, arguments, options, 1e-6)


@pytest.mark.aot
@needs_cuda_plugin
def test_a_token_copies_no_inputs():
    aot, (arguments, options) = AOT("h200"), token_of(jnp.bfloat16, size=128)
    specs = [aot.spec(jnp.shape(array), jnp.asarray(array).dtype) for array in arguments]
    step = jax.jit(functools.partial(short_conv_token, implementation="triton", **options), donate_argnums=2)
    memory = aot.compile(step, *specs).memory_analysis()
    assert memory.alias_size_in_bytes == arguments[2].nbytes and memory.temp_size_in_bytes < 2**16


@pytest.mark.gpu
def test_a_token_on_the_card():
    arguments, options = token_of(jnp.bfloat16, heads=64, size=128, units=32, rows=32)
    step = jax.jit(functools.partial(short_conv_token, implementation="triton", **options), donate_argnums=2)
    close_to_sums(step(*(jnp.copy(array) for array in arguments)), arguments, options, 2**-7)


def test_a_token_that_does_not_fit_is_refused():
    (x, weight, inputs, layer, rows), options = token_of(jnp.float32)
    for given, message in (
        ((x[..., :9], weight, inputs, layer, rows), r"x: expected shape \(4, 1, 160\), got \(4, 1, 9\)"),
        ((x, weight[:, 1:], inputs, layer, rows), r"weight: expected shape \(160, 4\), got \(160, 3\)"),
        ((x, weight, inputs, layer, rows[:1]), r"rows: expected shape \(4,\), got \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            short_conv_token(*given, **options)
    for wrong, message in (
        ({"units": (6, 32)}, r"units: expected heads of at most 160 channels in all, got \(6, 32\)"),
        ({"activation": "tanh"}, "activation: expected one of .*, got 'tanh'"),
    ):
        with pytest.raises(ValueError, match=message):
            short_conv_token(x, weight, inputs, layer, rows, **(options | wrong))
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        short_conv_token(x, weight, inputs, layer, rows, **options, implementation="triton")
