"""A norm before adapters, by XLA and by Triton in the interpreter, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8 import quantize_rows
from pallas_kernels.rms_norm import reference
from pallas_kernels.rms_norm.lora import (
    REGISTRY,
    ROUND,
    Gradients,
    Normed,
    rms_norm_lora_backward,
    rms_norm_lora_round,
    triton,
)
from tests.support.close import close

EPS = 1e-3


def operands(dtype, rows=192, width=192, rank=16, offset=0.0):
    """x, weight, A, and the gradients of x, the normalised rows and the rank products."""
    rng = np.random.default_rng(0)
    x, dresidual, dnormed = rng.standard_normal((3, rows, width))
    weight = 1 - offset + 0.3 * rng.standard_normal(width)
    a, dproducts = 0.2 * rng.standard_normal((rank, width)), rng.standard_normal((rows, rank))
    return [jnp.asarray(array, dtype) for array in (x, weight, a, dresidual, dnormed, dproducts)]


def exact(arrays, offset):
    """The gradients of x, weight and A in float64 by differentiation."""
    with jax.enable_x64(True):
        x, weight, a, *gradients = (array.astype(jnp.float64) for array in arrays)

        def forward(x, weight, a):
            normed = reference.rms_norm(x, weight, eps=EPS, offset=offset)
            return x, normed, normed @ a.T

        _, pullback = jax.vjp(forward, x, weight, a)
        return pullback(tuple(gradients))


def results(arrays, offset, implementation=None):
    x, weight, a, *gradients = arrays
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1) + EPS)
    normed = reference.rms_norm(x, weight, eps=EPS, offset=offset)
    found = Normed(x, weight, rstd, (normed.astype(jnp.float32) @ a.astype(jnp.float32).T).astype(x.dtype))
    return rms_norm_lora_backward(found, a, Gradients(*gradients), offset=offset, implementation=implementation)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_xla_matches_float64(offset):
    arrays = operands(jnp.float32, offset=offset)
    # float32, sums over 192 tokens or features
    close(jax.jit(results, static_argnums=(1,))(arrays, offset), exact(arrays, offset), 2e-6)


@pytest.mark.exhaustive(
    "0.0-capability0-bfloat16", "1.0-capability0-float16", "0.0-capability1-float16", "1.0-capability1-bfloat16"
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_triton_in_the_interpreter_matches_float64(monkeypatch, offset, capability, dtype):
    arrays = operands(dtype, offset=offset)
    tiles = triton.backward_config(capability, 16)
    by_triton = REGISTRY["xla"]._replace(forward=lambda *arguments: triton.backward(*arguments, tiles, True))
    monkeypatch.setitem(REGISTRY.implementations, "xla", by_triton)
    # one rounding of the normalised rows or of what they are multiplied by, of which A's gradient is a sum, and one of
    # x's gradient
    close(results(arrays, offset, "xla"), exact(arrays, offset), float(jnp.finfo(dtype).eps) / 2)


def test_factors_of_rows_and_columns_lose_nothing():
    """Whatever their sizes, and where a row is not finite."""
    rng = np.random.default_rng(1)
    x, _, a, *gradients = operands(jnp.bfloat16, 64, 64)
    scale = jnp.asarray(np.exp2(rng.uniform(-6, 6, 64)), jnp.float32)
    rstd = jnp.asarray(np.exp2(rng.uniform(-12, 12, 64)), jnp.float32)
    mean = jnp.asarray(rng.standard_normal(64), jnp.float32).at[7].set(jnp.inf)
    tiles = triton.backward_config((9, 0), 16)
    found, _ = triton.backward(x, scale, rstd, mean, a, *gradients, tiles, True)
    wide = [np.asarray(array, np.float64) for array in (x, a, *gradients)]
    x, a, dresidual, dnormed, dproducts = wide
    g = (dnormed + dproducts @ a) * np.asarray(scale, np.float64)
    rows = [np.asarray(vector, np.float64)[:, None] for vector in (rstd, mean)]
    expected = dresidual + rows[0] * (g - x * rows[0] * rows[1])
    finite = np.arange(64) != 7
    assert not np.isfinite(found[7]).any()
    off = np.abs(np.asarray(found, np.float64) - expected)[finite]
    size = np.abs(dresidual) + np.abs(rows[0] * g) + np.abs(rows[0] ** 2 * rows[1] * x)
    assert (off <= 2**-8 * size[finite]).all()  # of its addends: one rounding


def check_rounded(found, x, weight, a, offset):
    """Rows in float8, products and rstd against float64's norm."""
    rows, products, rstd = found
    with jax.enable_x64(True):
        normed = np.asarray(reference.rms_norm(x.astype(np.float64), weight, eps=EPS, offset=offset))
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(np.mean(wide**2, axis=1) + EPS), rtol=1e-5)
    once = quantize_rows(jnp.asarray(normed, x.dtype))
    # rounded to 8 bits, which may put a row's largest just above 448 of a scale or a number onto the next code
    assert (np.log2(np.asarray(rows.scales / once.scales)) != 0).mean() < 0.02
    values = np.asarray(rows.codes, np.float64) * np.asarray(rows.scales, np.float64)[:, None]
    # half a place of three bits or of the least number's, after a rounding to 16 bits
    half = np.maximum(np.abs(normed) * 2.0**-4, np.asarray(rows.scales, np.float64)[:, None] * 2.0**-10)
    eps = float(jnp.finfo(x.dtype).eps)
    assert (np.abs(values - normed) <= half * (1 + eps) + np.abs(normed) * eps).all()
    exact = normed @ np.asarray(a, np.float64).T
    assert products.dtype == x.dtype
    assert np.linalg.norm(np.asarray(products, np.float64) - exact) < eps * np.linalg.norm(exact)


@pytest.mark.exhaustive("192-0.0-bfloat16", "192-1.0-float16", "256-0.0-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [192, 256])
def test_rows_in_float8_and_their_products(monkeypatch, offset, dtype, width):
    x, weight, a, *_ = operands(dtype, width=width, offset=offset)
    x = x * jnp.asarray(np.exp2(np.arange(192) % 12 - 6.0), dtype)[:, None]
    options = {"eps": EPS, "offset": offset}
    check_rounded(rms_norm_lora_round(x, weight, a, **options), x, weight, a, offset)
    for name in ("round_rows", "products"):
        monkeypatch.setattr(triton, name, functools.partial(getattr(triton, name), interpret=True))
    check_rounded(ROUND["triton"].forward(x, weight, a, EPS, offset), x, weight, a, offset)


def test_what_does_not_fit_is_refused():
    x, weight, a, dresidual, dnormed, dproducts = operands(jnp.float32)
    normed = Normed(x, weight, x[:, 0], dproducts)
    with pytest.raises(ValueError, match=r"products of \[192, 16\], got .* \[\(192, 16\), \(192, 8\)\]"):
        rms_norm_lora_backward(normed, a, Gradients(dresidual, dnormed, dproducts[:, :8]))
    with pytest.raises(NotImplementedError, match="'triton' cannot serve this call"):
        rms_norm_lora_backward(normed, a, Gradients(dresidual, dnormed, dproducts), implementation="triton")
    with pytest.raises(ValueError, match=r"weight must be \[192\] and lora_A float32 \[R, 192\], got \[191\]"):
        rms_norm_lora_round(x, weight[1:], a, eps=EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 64])
def test_on_a_card(rank):
    arrays = operands(jnp.bfloat16, 2048, 4096, rank)
    run = jax.jit(results, static_argnums=(1, 2))
    found = run(arrays, 0.0, "triton")
    close(found, exact(arrays, 0.0), 2**-8)
    assert all(bool(jnp.array_equal(one, other)) for one, other in zip(found, run(arrays, 0.0, "triton"), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "width"), [(16, 4096), (64, 8192)])
def test_rows_in_float8_and_their_products_on_a_card(rank, width):
    x, weight, a, *_ = operands(jnp.bfloat16, 2048, width, rank)
    run = jax.jit(lambda *arrays: rms_norm_lora_round(*arrays, eps=EPS, implementation="triton"))
    check_rounded(run(x, weight, a), x, weight, a, 0.0)
    jax.tree.map(np.testing.assert_array_equal, run(x, weight, a), run(x, weight, a))
