import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope import reference, rope


def tables(batch, length, half, base=500.0, seed=0):
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 40, (batch, length))
    angles = positions[:, :, None] * base ** (-np.arange(half)[None, None, :] / half)
    return np.cos(angles), np.sin(angles)


def value_and_gradient(function, *arrays):
    @jax.jit
    def both(x, cos, sin, dy):
        y, vjp = jax.vjp(lambda x: function(x, cos, sin), x)
        return (y, *vjp(dy))

    return both(*arrays)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_value_and_gradient_match_float64(dtype, tolerance):
    rng = np.random.default_rng(1)
    cos, sin = tables(2, 9, 8)
    x = jnp.asarray(rng.standard_normal((2, 9, 3, 16)), dtype)
    dy = jnp.asarray(rng.standard_normal((2, 9, 3, 16)), dtype)
    y, dx = value_and_gradient(rope, x, jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32), dy)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in (x, cos, sin, dy)]
        expected, expected_dx = value_and_gradient(reference.rope, *wide)
    assert y.dtype == dx.dtype == dtype
    # one rounding of the result; tables in float32
    for ours, theirs in ((y, expected), (dx, expected_dx)):
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=tolerance, atol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone():
    half, rng = 8, np.random.default_rng(2)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 2 * half)), jnp.float32) for _ in range(2))

    def at(x, position):
        angles = position * 500.0 ** (-np.arange(half) / half)[None, None, :]
        return rope(x, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))

    assert np.allclose(jnp.linalg.norm(at(q, 7)), jnp.linalg.norm(q), rtol=1e-6)
    near, far = jnp.vdot(at(q, 3), at(k, 1)), jnp.vdot(at(q, 103), at(k, 101))
    assert np.allclose(near, far, rtol=1e-4, atol=1e-5)  # float32 angles of about 100 radians


def test_residuals_are_the_tables():
    cos, sin = (jnp.asarray(t, jnp.float32) for t in tables(2, 9, 8))
    _, vjp = jax.vjp(lambda x: rope(x, cos, sin), jnp.ones((2, 9, 4, 16), jnp.bfloat16))
    assert sorted(leaf.shape for leaf in jax.tree.leaves(vjp)) == [cos.shape, sin.shape]


def test_tables_of_another_shape_are_refused():
    cos, sin = (jnp.asarray(t, jnp.float32) for t in tables(2, 9, 8))
    with pytest.raises(ValueError, match=r"\(2, 9, 4\)"):
        rope(jnp.ones((2, 9, 4, 8)), cos, sin)


@pytest.mark.torch
def test_matches_transformers_llama():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    rng = np.random.default_rng(3)
    cos, sin = (t.astype(np.float32) for t in tables(2, 9, 8))
    q = rng.standard_normal((2, 9, 4, 16)).astype(np.float32)
    doubled = (torch.tensor(np.concatenate([t, t], axis=-1)) for t in (cos, sin))
    theirs, _ = modeling.apply_rotary_pos_emb(torch.tensor(q), torch.tensor(q), *doubled, unsqueeze_dim=2)
    np.testing.assert_allclose(rope(jnp.asarray(q), jnp.asarray(cos), jnp.asarray(sin)), theirs.numpy(), atol=1e-6)
