"""The way from a projection with adapters to attention, by XLA and by Triton in the interpreter, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8 import quantize_rows
from pallas_kernels.split_rope.lora import (
    reference,
    split_rope_lora_backward,
    split_rope_lora_forward,
    triton,
)
from tests.support.close import close
from tests.support.scaled import scaled


def operands(shared, dtype, rows=128, heads=(4, 2), size=32, rank=16, make=None):
    """base, products, B, cos, sin; gradients of queries, keys and values."""
    rng, widths = np.random.default_rng(0), [count * size for count in (heads[0], heads[1], heads[1])]
    make = make or (lambda shape, scale, dtype: jnp.asarray(scale * rng.standard_normal(shape), dtype))
    angles = [make((rows, size // 2), 1.0, jnp.float32) for _ in range(2)]
    products = make((rows, rank if shared else 3 * rank), 1.0, dtype)
    gradients = tuple(make((rows, width), 1.0, dtype) for width in widths)
    return make((rows, sum(widths)), 1.0, dtype), products, make((sum(widths), rank), 0.3, dtype), *angles, gradients


def exact(arrays, heads):
    """Queries, keys and values, and the gradients of base, products and B, in float64 by differentiation."""
    with jax.enable_x64(True):
        base, products, b, cos, sin, gradients = jax.tree.map(lambda array: array.astype(jnp.float64), arrays)
        found, pullback = jax.vjp(
            lambda *trained: reference.split_rope_lora(*trained, cos, sin, heads=heads), base, products, b
        )
        return *found, *pullback(gradients)


def results(arrays, heads, implementation=None):
    base, products, b, cos, sin, gradients = arrays
    found = split_rope_lora_forward(base, products, b, cos, sin, heads=heads, implementation=implementation)
    back = split_rope_lora_backward(gradients, products, b, cos, sin, heads=heads, implementation=implementation)
    return *found, *back[:3]


@pytest.mark.parametrize("shared", [False, True])
def test_xla_matches_float64(shared):
    arrays = operands(shared, jnp.float32)
    # float32, sums of up to 256 products
    close(jax.jit(results, static_argnums=(1,))(arrays, (4, 2)), exact(arrays, (4, 2)), 1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_triton_in_the_interpreter_matches_float64(shared):
    arrays = operands(shared, jnp.bfloat16)
    found = triton.forward(*arrays[:5], (4, 2), True)
    # one rounding to bfloat16
    close(found, exact(arrays, (4, 2))[:3], 2**-9)


@pytest.mark.parametrize("shared", [False, True])
def test_scales_that_are_left_to_the_turn_change_no_bit(shared):
    base, *others, _ = operands(shared, jnp.bfloat16)
    apart, plain = scaled(base)
    by_xla = [split_rope_lora_forward(array, *others, heads=(4, 2), implementation="xla") for array in (apart, plain)]
    by_triton = [triton.forward(array, *others, (4, 2), True) for array in (apart, plain)]
    for found, expected in (by_xla, by_triton):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_of_the_product_comes_in_float8_too(shared):
    _, products, b, cos, sin, gradients = operands(shared, jnp.bfloat16)
    options = {"heads": (4, 2), "implementation": "xla"}
    plain = split_rope_lora_backward(gradients, products, b, cos, sin, **options)
    found = split_rope_lora_backward(gradients, products, b, cos, sin, rounded=True, **options)
    jax.tree.map(np.testing.assert_array_equal, found, plain._replace(rows=quantize_rows(plain.base)))
    assert plain.rows is None


@pytest.mark.gpu
def test_the_gradient_of_the_product_comes_in_float8_too_on_a_card():
    _, products, b, cos, sin, gradients = operands(False, jnp.bfloat16, 2048, (32, 8), 128)
    run = jax.jit(
        lambda gradients, rounded: split_rope_lora_backward(
            gradients, products, b, cos, sin, heads=(32, 8), rounded=rounded, implementation="triton"
        ),
        static_argnums=1,
    )
    plain = run(gradients, False)
    jax.tree.map(np.testing.assert_array_equal, run(gradients, True), plain._replace(rows=quantize_rows(plain.base)))


@pytest.mark.parametrize(
    ("place", "array", "message"),
    [
        (0, jnp.ones((128, 250)), r"base must be \[N, 256\]"),
        (1, jnp.ones((128, 20)), r"products \[128, 3R\] or \[128, R\], got \[256, 16\] and \[128, 20\]"),
        (2, jnp.ones((256, 16), jnp.bfloat16), "one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(place, array, message):
    arrays = list(operands(False, jnp.float32)[:5])
    arrays[place] = array
    with pytest.raises(ValueError, match=message):
        split_rope_lora_forward(*arrays, heads=(4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_on_a_card(shared):
    arrays = operands(shared, jnp.bfloat16, 2048, (32, 8), 128)
    run = jax.jit(results, static_argnums=(1, 2))
    found = run(arrays, (32, 8), "triton")
    # one rounding to bfloat16; the gradients behind B are sums over what has been rounded
    close(found, exact(arrays, (32, 8)), 2**-8)
    assert all(
        bool(jnp.array_equal(one, other)) for one, other in zip(found, run(arrays, (32, 8), "triton"), strict=True)
    )


@pytest.mark.gpu
def test_scales_that_are_left_to_the_turn_change_no_bit_on_a_card():
    base, *others, _ = operands(False, jnp.bfloat16, 2048, (32, 8), 128)
    run = jax.jit(lambda base: split_rope_lora_forward(base, *others, heads=(32, 8), implementation="triton"))
    found, expected = map(run, scaled(base))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
