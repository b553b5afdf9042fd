import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.glu import ACTIVATIONS, glu, reference


def value_and_gradients(function, *arrays):
    @jax.jit
    def both(gate, up, dy):
        y, vjp = jax.vjp(function, gate, up)
        return (y, *vjp(dy))

    return both(*arrays)


@pytest.mark.optimized
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 2**-8)])
def test_value_and_gradients_match_float64(activation, dtype, tolerance):
    rng = np.random.default_rng(0)
    gate, up, dy = (jnp.asarray(3 * rng.standard_normal((2, 5, 32)), dtype) for _ in range(3))
    ours = value_and_gradients(lambda gate, up: glu(gate, up, activation=activation), gate, up, dy)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in (gate, up, dy)]
        expected = value_and_gradients(lambda gate, up: reference.glu(gate, up, activation=activation), *wide)
    for actual, theirs in zip(ours, expected, strict=True):
        assert actual.dtype == dtype
        # one rounding of each result; where gate is very negative, float32's 1 + tanh and 1 + erf keep only the
        # absolute precision of 1: a few units of 6e-8, times the factors that make up the largest result
        atol = 1e-6 * np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(actual, np.float64), theirs, rtol=tolerance, atol=atol)


def test_residuals_are_gate_and_up():
    gate = jnp.ones((4, 8), jnp.bfloat16)
    _, vjp = jax.vjp(lambda gate, up: glu(gate, up, activation="silu"), gate, gate * 2)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(vjp)] == [((4, 8), jnp.bfloat16)] * 2


def test_unknown_activation_and_mismatch_are_refused():
    with pytest.raises(ValueError, match="activation must be one of gelu, .*silu.*, got 'mish'"):
        glu(jnp.ones(4), jnp.ones(4), activation="mish")
    with pytest.raises(ValueError, match="the same shape and dtype"):
        glu(jnp.ones(4), jnp.ones(4, jnp.bfloat16), activation="silu")


@pytest.mark.torch
@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS) - {"gelu_tanh"}))  # that name is torch's, not HF's
def test_activations_are_those_of_transformers(activation):
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    gate = np.linspace(-6.0, 6.0, 101, dtype=np.float32)
    theirs = activations.ACT2FN[activation](torch.tensor(gate)).numpy()
    ours = glu(jnp.asarray(gate), jnp.ones(101, jnp.float32), activation=activation)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
