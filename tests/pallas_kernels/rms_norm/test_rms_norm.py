import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import reference, rms_norm

EPS = 1e-5


def inputs(shape, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal(shape).astype(dtype),
        rng.standard_normal(shape[-1]).astype(dtype),
        rng.standard_normal(shape).astype(dtype),
    )


def value_and_gradients(function, *arrays):
    @jax.jit
    def both(x, weight, dy):
        y, vjp = jax.vjp(function, x, weight)
        return (y, *vjp(dy))

    return both(*arrays)


def oracle(*arrays, offset):
    """Value and gradients in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in arrays]
        results = value_and_gradients(lambda x, weight: reference.rms_norm(x, weight, eps=EPS, offset=offset), *wide)
        return tuple(np.asarray(a) for a in results)


@pytest.mark.parametrize("shape, offset", [((2, 5, 48), 0.0), ((64,), 1.0)])
@pytest.mark.parametrize(
    "dtype, weight_dtype, tolerance",
    [
        (jnp.float32, jnp.float32, 2e-6),  # float32 rounding
        (jnp.bfloat16, jnp.bfloat16, 2**-7),  # two bfloat16 roundings
        (jnp.bfloat16, jnp.float32, 2**-7),
        (jnp.float16, jnp.float32, 2**-10),
    ],
)
def test_value_and_gradients_match_float64(shape, offset, dtype, weight_dtype, tolerance):
    x, weight, dy = inputs(shape)
    x, weight, dy = jnp.asarray(x, dtype), jnp.asarray(weight, weight_dtype), jnp.asarray(dy, dtype)
    ours = value_and_gradients(lambda x, weight: rms_norm(x, weight, eps=EPS, offset=offset), x, weight, dy)
    assert [a.dtype for a in ours] == [dtype, dtype, weight_dtype]
    for actual, theirs in zip(ours, oracle(x, weight, dy, offset=offset), strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(actual, np.float64), theirs, rtol=tolerance, atol=tolerance * scale)


def test_a_row_of_zeros_is_finite():
    x = jnp.zeros((2, 16), jnp.float32)
    y, vjp = jax.vjp(lambda x: rms_norm(x, jnp.ones(16, jnp.float32), eps=1e-6), x)
    (dx,) = vjp(jnp.ones_like(y))
    assert not np.any(y) and np.all(np.isfinite(dx))


def test_residuals_hold_no_float32_copy_of_x():
    x, weight = jnp.ones((4, 32, 64), jnp.bfloat16), jnp.ones(64, jnp.bfloat16)
    _, vjp = jax.vjp(lambda x, weight: rms_norm(x, weight, eps=EPS), x, weight)
    held = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= x.size]
    assert [leaf.dtype for leaf in held] == [jnp.bfloat16]


def test_weight_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"weight must have the shape of x's last axis, \(8,\), got \(1,\)"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(1), eps=EPS)


@pytest.mark.torch
def test_matches_transformers_llama():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, weight, _ = inputs((3, 5, 64), np.float32)
    for dtype, torch_dtype, tolerance in ((jnp.float32, torch.float32, 1e-6), (jnp.bfloat16, torch.bfloat16, 2**-7)):
        norm = modeling.LlamaRMSNorm(64, eps=EPS).to(torch_dtype)
        norm.weight.data = torch.tensor(weight).to(torch_dtype)
        theirs = norm(torch.tensor(x).to(torch_dtype)).detach().float().numpy()
        ours = rms_norm(jnp.asarray(x, dtype), jnp.asarray(weight, dtype), eps=EPS)
        # bfloat16: XLA may keep the normalised row in float32 where torch rounds it, one ulp
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=tolerance, atol=1e-6)
