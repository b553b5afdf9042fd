"""The gated delta rule by chunks beside its recurrence in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta, gated_delta_token, reference, token, triton, triton_backward, xla
from pallas_kernels.gated_delta.chunks import CHUNK, chunks_of
from tests.support.aot import AOT, needs_cuda_plugin

NAMES = ("q", "k", "v", "decay", "beta", "state")


def inputs(length, *, rows=2, key_heads=2, heads=4, size=16, value_size=8, decay=0.01, alike=0.0):
    """Operands by name in float64, and documents of any length.

    Args:
        length: tokens.
        rows: of the batch.
        key_heads: heads of queries and keys.
        heads: of values.
        size: of a key.
        value_size: of a value.
        decay: how fast the state is forgotten, in the median; slowly, so that it passes through many chunks.
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

    factors = [jnp.asarray(factor, operands["decay"].dtype) for factor in factors]
    return program(operation, **options)(operands, ids, factors)[::-1]


@functools.cache
def program(operation, **options):
    """Inputs of equal shapes share a compilation."""

    def loss(operands, ids, factors):
        found = operation(**operands, segment_ids=ids, scale=0.3, **options)
        of_out, of_state = (factor.astype(found[1].dtype) for factor in factors)
        return jnp.sum(found[0].astype(of_out.dtype) * of_out) + jnp.sum(found[1] * of_state), found

    return jax.jit(jax.grad(loss, has_aux=True))


def compare(operands, ids, dtype, bound, **options):
    rng = np.random.default_rng()
    factors = [rng.normal(size=operands[name].shape) for name in ("v", "state")]
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(array, jnp.float64) for name, array in operands.items()}
        expected = both(reference.gated_delta, wide, ids, factors)
    given = {
        name: jnp.asarray(array, dtype if name in ("q", "k", "v") else jnp.float32) for name, array in operands.items()
    }
    found = both(gated_delta, given, ids, factors, **options)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        other = np.asarray(other)
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= bound * np.linalg.norm(other)


@pytest.mark.exhaustive("64-False", "150-True")
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


def test_the_identity_is_in_no_product_of_16_bits():
    """It would round the corrections: errors of 3.8, 3.5 and 3.3 thousandths (out, dv, d beta) for 3.5, 2.9 and 2.6."""
    operands, _ = inputs(192, size=32, value_size=32)
    operands.pop("state")
    dout = np.random.default_rng().normal(size=operands["v"].shape)
    halves = {name: jnp.asarray(operands[name], jnp.bfloat16) for name in ("q", "k", "v")}
    operands |= {name: np.asarray(array, np.float64) for name, array in halves.items()}
    given = halves | {name: jnp.asarray(operands[name], jnp.float32) for name in ("decay", "beta")}

    def both(operation, operands, dtype, **options):
        out, vjp = jax.vjp(lambda operands: operation(**operands, scale=0.3, **options)[0], operands)
        return out, vjp(jnp.asarray(dout, jnp.bfloat16).astype(dtype))[0]

    found, gradients = jax.jit(lambda operands: both(gated_delta, operands, jnp.bfloat16))(given)
    with jax.enable_x64(True):
        state = jnp.zeros((2, 4, 32, 32))
        recurrence = functools.partial(reference.gated_delta, segment_ids=None, state=state)
        wide = {name: jnp.asarray(array) for name, array in operands.items()}
        expected, others = jax.jit(lambda operands: both(recurrence, operands, jnp.float64))(wide)
    for one, other, bound in (
        (found, expected, 3.63e-3),
        (gradients["v"], others["v"], 3.27e-3),
        (gradients["beta"], others["beta"], 3.05e-3),
    ):
        other = np.asarray(other)
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= bound * np.linalg.norm(other)


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_as_in_xla(packed):
    """Interpreted in float32; ten chunks are more than the parts that documents may start."""
    operands, ids = inputs(640, key_heads=1, heads=2, size=64, value_size=64)
    given = {name: jnp.asarray(array, jnp.float32) for name, array in operands.items()}
    chunks = chunks_of(given["decay"], given["beta"], jnp.asarray(ids) if packed else None)
    assert (np.diff(triton.parts(chunks), axis=1) > 0).sum() > 2 if packed else True
    arrays = (given["q"], given["k"], given["v"], chunks, given["state"])
    expected = xla.forward(*arrays, 0.3)
    found = triton.forward(*arrays, 0.3, interpret=True)
    rng = np.random.default_rng()
    gradients = [jnp.asarray(rng.normal(size=array.shape), jnp.float32) for array in expected[:2]]
    expected += xla.backward(*arrays, expected[2], *gradients, 0.3)
    found += triton_backward.backward(*arrays, found[2], *gradients, 0.3, interpret=True)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def test_parts_begin_where_documents_do():
    for count in (1, 3, 8, 21):
        ids = jnp.asarray(np.sort(np.random.default_rng().integers(1, 9, (4, count * CHUNK)), axis=1), jnp.int32)
        chunks = chunks_of(jnp.zeros((*ids.shape, 1)), jnp.zeros((*ids.shape, 1)), ids)
        bounds = np.asarray(triton.parts(chunks))
        assert (bounds[:, 0] == 0).all() and (bounds[:, -1] == count).all() and (np.diff(bounds) >= 0).all()
        for row, inner in enumerate(bounds[:, 1:-1]):
            for chunk in inner[inner < count]:
                assert chunk > 0 and ids[row, chunk * CHUNK - 1] != ids[row, chunk * CHUNK + CHUNK - 1]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("sizes", "key_heads", "decay"), [(128, 2, 0.1), (128, 4, 10.0), (64, 1, 1e-3)])
def test_on_the_card(sizes, key_heads, decay, packed):
    operands, ids = inputs(1000, key_heads=key_heads, size=sizes, value_size=sizes, decay=decay)
    operands |= {name: np.asarray(jnp.asarray(operands[name], jnp.bfloat16), np.float64) for name in ("q", "k", "v")}
    compare(operands, ids if packed else None, jnp.bfloat16, 1.5e-2, implementation="triton")


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive("128-4090")
@pytest.mark.parametrize("card", ["4090", "a100-80", "h200"])
@pytest.mark.parametrize("size", [64, 128])
def test_it_fits_the_card(size, card):
    aot = AOT(card)
    shapes = [(1, 512, 2, size, jnp.bfloat16)] * 2 + [(1, 512, 4, size, jnp.bfloat16)] + [(1, 512, 4, jnp.float32)] * 2

    def loss(*operands):
        return jnp.sum(gated_delta(*operands, scale=1.0, implementation="triton")[0].astype(jnp.float32))

    aot.compile(jax.grad(loss, argnums=tuple(range(5))), *(aot.spec(shape[:-1], shape[-1]) for shape in shapes))


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


def token_of(operands, layer, dtype):
    """Arguments of a token of some rows in one of three layers, all other states poisoned; the first token has none."""
    count = len(operands["v"])
    rows = np.random.default_rng().permutation(count + 1).astype(np.int32)[:count]
    rows[0] = count + 1
    states = np.full((3, count + 1, *operands["state"].shape[1:]), np.nan, np.float32)
    states[layer, rows[1:]] = operands["state"][1:]
    heads = np.concatenate([operands[name].reshape(count, 1, -1) for name in ("q", "k", "v")], axis=-1)
    gates = (jnp.asarray(operands[name], jnp.float32) for name in ("decay", "beta"))
    return [jnp.asarray(heads, dtype), *gates, jnp.asarray(states), layer, jnp.asarray(rows)]


def close_to_rule(found, operands, arguments, bound):
    layer, rows = arguments[4], np.asarray(arguments[5])
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(array, jnp.float64) for name, array in operands.items()}
        expected = [np.asarray(array)[1:] for array in reference.gated_delta(**wide, scale=0.3, segment_ids=None)]
    out, states = (np.asarray(array, np.float64) for array in found)
    assert not out[0].any()
    for one, other, most in zip((out[1:], states[layer, rows[1:]]), expected, bound, strict=True):
        assert np.linalg.norm(one - other) <= most * np.linalg.norm(other)
    states[layer, rows[1:]] = np.nan
    assert np.isnan(states).all()


@pytest.mark.parametrize("layer", [0, 2])
def test_a_token_in_its_layers_states(layer):
    operands, _ = inputs(1, rows=4, size=64, value_size=128)
    given = token_of(operands, layer, jnp.float32)
    close_to_rule(gated_delta_token(*given, scale=0.3), operands, given, (1e-6, 1e-6))
    *first, layer, rows = given
    found = token.in_triton(*first, jnp.int32(layer), rows, 0.3, interpret=True)
    close_to_rule(found, operands, given, (1e-6, 1e-6))


@pytest.mark.aot
@needs_cuda_plugin
def test_a_token_copies_no_states():
    aot, half, wide = AOT("h200"), jnp.bfloat16, jnp.float32
    heads, gates = aot.spec((8, 1, 8 * 128), half), [aot.spec((8, 1, 4), wide)] * 2
    states, numbers = aot.spec((6, 9, 4, 128, 128), wide), (aot.spec((), jnp.int32), aot.spec((8,), jnp.int32))
    step = jax.jit(functools.partial(gated_delta_token, scale=1.0, implementation="triton"), donate_argnums=3)
    memory = aot.compile(step, heads, *gates, states, *numbers).memory_analysis()
    assert memory.alias_size_in_bytes == 6 * 9 * 4 * 128 * 128 * 4 and memory.temp_size_in_bytes < 2**16


@pytest.mark.gpu
def test_a_token_on_the_card():
    operands, _ = inputs(1, rows=32, key_heads=16, heads=32, size=128, value_size=128)
    operands |= {name: np.asarray(jnp.asarray(operands[name], jnp.bfloat16), np.float64) for name in ("q", "k", "v")}
    given = token_of(operands, 1, jnp.bfloat16)
    step = jax.jit(functools.partial(gated_delta_token, scale=0.3, implementation="triton"), donate_argnums=3)
    close_to_rule(step(*given), operands, given, (3e-3, 1e-6))


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
    heads, *gates, states, layer, rows = token_of(inputs(1)[0], 0, jnp.float32)
    for arguments, message in (
        ((heads[..., :-8], *gates, states, layer, rows), "4 values of 8, a multiple of the keys, .* got 88 features"),
        ((jnp.tile(heads, (1, 2, 1)), *gates, states, layer, rows), r"heads: expected axes \(2, 1, 96\)"),
        ((heads, gates[0][..., :1], gates[1], states, layer, rows), r"decay: expected axes \(2, 1, 4\)"),
        ((heads, *gates, states, layer, rows[:1]), r"rows: expected axes \(2,\), got \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            gated_delta_token(*arguments, scale=0.3)
    with pytest.raises(ValueError, match="multiple of the 2 key heads, got 3"):
        gated_delta(*(given[name][:, :, :3] if name in NAMES[2:5] else given[name] for name in NAMES[:5]), scale=0.3)
