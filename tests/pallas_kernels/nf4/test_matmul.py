"""The product with a packed weight: values and gradient against the dense product, and the saved residuals."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.nf4 import reference

DTYPES = ["float32", "bfloat16", "float16"]
# Largest error over largest value: both sides round the same exact products once to the dtype, in sums of `in` terms.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}
SHAPES = [((96, 192), "split"), ((96, 192), "bitsandbytes"), ((7, 13), "bitsandbytes")]


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantised(weight, order, dtype):
    """Codes, scales, and the matrix that they decode to."""
    rows, columns = weight.shape
    codes, absmax = nf4.quantize(weight)
    if order == "split":
        codes = nf4.reorder(codes, "bitsandbytes", "split").reshape(rows, columns // 2)
    return codes, absmax, reference.dequantize(codes, absmax, shape=weight.shape, dtype=dtype, order=order)


def case(shape, order, dtype, rows=(2, 5)):
    rng = np.random.default_rng(0)
    codes, absmax, dense = quantised(rng.standard_normal(shape).astype(np.float32), order, dtype)
    x, dy = (jnp.asarray(rng.standard_normal((*rows, size)), dtype) for size in (shape[1], shape[0]))
    return x, dy, codes, absmax, dense


def exact(a, b):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    error = np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[dtype], error


@pytest.mark.parametrize(
    ("rows", "dtype", "asked"),
    [((1, 127), None, "float32"), ((1, 128), None, "bfloat16"), ((1, 128), "float32", "float32")],
)
def test_sums_of_few_rows_are_float32_until_the_end(rows, dtype, asked):
    """XLA on a GPU may split them, and adds the parts in the dtype that it is asked for."""
    shape, order = SHAPES[0]
    x, _, codes, absmax, _ = case(shape, order, "bfloat16", rows)
    traced = jax.make_jaxpr(lambda x: nf4.matmul(x, codes, absmax, shape=shape, order=order, dtype=dtype))(x)
    assert traced.out_avals[0].dtype == (dtype or "bfloat16")
    assert re.findall(r"preferred_element_type=(\w+)", str(traced)) == [asked]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, order", SHAPES)
def test_value_and_gradient_equal_the_dense_product(shape, order, dtype):
    x, dy, codes, absmax, dense = case(shape, order, dtype)

    @jax.jit
    def both(x, dy, codes, absmax):
        y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=shape, order=order), x)
        return y, *pullback(dy)

    y, dx = both(x, dy, codes, absmax)
    assert_close(y, exact(x, dense.T), dtype)
    assert_close(dx, exact(dy, dense), dtype)


def test_float32_is_float32_and_16_bit_sums_are_float32():
    """4,096 products whose sum is far larger than each: a 16-bit accumulator would stop growing."""
    shape = (64, 4096)
    codes, absmax = nf4.quantize(jnp.ones(shape))
    for dtype in DTYPES:
        y = nf4.matmul(jnp.ones((1, 4096), dtype), codes, absmax, shape=shape, order="bitsandbytes")
        np.testing.assert_array_equal(y.astype(jnp.float32), 4096.0)


def test_no_gradient_flows_to_the_packed_weight():
    x, _, codes, absmax, _ = case((96, 192), "split", "float32")
    grads = jax.grad(lambda x, a: nf4.matmul(x, codes, a, shape=(96, 192)).sum(), argnums=(0, 1))(x, absmax)
    assert grads[0].any() and not grads[1].any()


def test_another_map_reaches_value_and_gradient():
    x, dy, codes, absmax, _ = case((96, 192), "split", "float32")
    quant_map = jnp.linspace(-1, 1, 16, dtype=jnp.float32)
    dense = reference.dequantize(codes, absmax, shape=(96, 192), dtype=jnp.float32, order="split", quant_map=quant_map)
    y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=(96, 192), quant_map=quant_map), x)
    assert_close(y, exact(x, dense.T), "float32")
    assert_close(pullback(dy)[0], exact(dy, dense), "float32")


def test_the_backward_pass_keeps_the_packed_weight_alone():
    x, _, codes, absmax, _ = case((96, 192), "split", "float32")
    _, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=(96, 192)), x)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "dtype")]
    assert sorted(leaf.nbytes for leaf in kept) == sorted([codes.nbytes, absmax.nbytes])


def test_scanned_layers_keep_no_decoded_weight():
    """Without the custom_vjp the residuals of a scan hold every layer's decoded weight."""
    layers, size = 3, 128
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((layers * size, size)), jnp.float32)
    codes, absmax = nf4.quantize(weight)
    codes = nf4.reorder(codes, "bitsandbytes", "split").reshape(layers, size, size // 2)
    absmax = absmax.reshape(layers, size, size // 64)

    def loss(x):
        def layer(x, packed):
            return jnp.tanh(nf4.matmul(x, *packed, shape=(size, size))), None

        return jax.lax.scan(layer, x, (codes, absmax))[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, size)))
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(scans) == 2
    stacked = {var.aval.shape for eqn in scans for var in (*eqn.invars, *eqn.outvars) if var.aval.ndim == 3}
    assert (layers, size, size) not in stacked


def test_bad_arguments_are_named():
    x, _, codes, absmax, _ = case((96, 192), "split", "float32")
    with pytest.raises(ValueError, match=r"x must be \[..., 192\].*got float32\(2, 5, 191\)"):
        nf4.matmul(x[..., 1:], codes, absmax, shape=(96, 192))
    with pytest.raises(ValueError, match="dtype must be bfloat16, float16 or float32, got int8"):
        nf4.matmul(x, codes, absmax, shape=(96, 192), dtype="int8")
    with pytest.raises(ValueError, match="nf4.matmul: codes of a 96×192 matrix"):
        nf4.matmul(x, codes[1:], absmax, shape=(96, 192))
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="triton"):
            nf4.matmul(x, codes, absmax, shape=(96, 192), implementation="triton")
