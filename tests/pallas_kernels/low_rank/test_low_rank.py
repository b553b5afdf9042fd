"""Sums with low-rank products: XLA against float64 by differentiation, Triton in the interpreter against the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8 import quantize_rows
from pallas_kernels.low_rank import (
    config,
    low_rank_add,
    low_rank_input_gradients,
    low_rank_output_gradients,
    low_rank_round_rows,
    reference,
    triton,
)
from pallas_kernels.tiles import RANKS
from tests.support.close import close
from tests.support.scaled import scaled

#: columns of each part, rank
CASES = [((64, 128, 64), 16), ((192,), 32)]
WIDTH = 192  # one and a half of the widest tile
CAPABILITIES = [(8, 0), (9, 0)]


def operands(parts, rank, dtype, rows=192, width=WIDTH, make=None):
    """residual, base, x, A, B, products, dy, dx; dx and products stand for results of other kernels."""
    rng, features, every = np.random.default_rng(0), sum(parts), len(parts) * rank
    make = make or (lambda shape, scale: jnp.asarray(scale * rng.standard_normal(shape), dtype))
    return (
        make((rows, features), 1.0),
        make((rows, features), 1.0),
        make((rows, width), 1.0),
        make((every, width), 0.1),
        make((features, rank), 0.3),
        make((rows, every), 1.0),
        make((rows, features), 1.0),
        make((rows, width), 1.0),
    )


def exact(arrays, parts):
    """The sum, and the gradients of the products, of B, of x and of A, in float64 by differentiation."""
    rank = arrays[4].shape[1]
    with jax.enable_x64(True):
        residual, base, x, a, b, products, dy, dx = (array.astype(jnp.float64) for array in arrays)
        eye = jnp.eye(len(parts) * rank)
        total, pullback = jax.vjp(
            lambda p, b: reference.low_rank_sum(residual, base, p, eye, b, parts=parts), products, b
        )
        dproducts, db = pullback(dy)
        _, pullback = jax.vjp(lambda x, a: x @ a.T, x, a)
        through, da = pullback(products)
    return total, dproducts, db, dx + through, da


def results(arrays, parts, implementation=None):
    residual, base, x, a, b, products, dy, dx = arrays
    options = {"implementation": implementation}
    return (
        low_rank_add(base, products, b, parts=parts, residual=residual, **options),
        *low_rank_output_gradients(dy, products, b, parts=parts, **options)[:2],
        *low_rank_input_gradients(dx, x, products, a, **options),
    )


@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_xla_matches_float64(parts, rank):
    arrays = operands(parts, rank, jnp.float32)
    # float32, sums of up to 256 products
    close(jax.jit(results, static_argnums=(1,))(arrays, parts), exact(arrays, parts), 1e-6)


@pytest.mark.exhaustive("parts0-16-capability0", "parts1-32-capability1")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_triton_in_the_interpreter_matches_float64(parts, rank, capability):
    arrays = residual, base, x, a, b, products, dy, dx = operands(parts, rank, jnp.bfloat16)
    found = [triton.add(residual, base, products, b, parts, config.add_config(rank), True)]
    found += triton.output_gradients(dy, products, b, parts, None, config.output_config(capability), True)[:2]
    found += triton.input_gradients(dx, x, products, a, config.input_config(capability, rank), True)
    # one rounding to bfloat16, of the results that have it
    close(found, exact(arrays, parts), 2**-9)
    alone = triton.add(None, base, products, b, parts, config.add_config(rank), True)
    close([alone], [exact((jnp.zeros_like(residual), *arrays[1:]), parts)[0]], 2**-9)


@pytest.mark.exhaustive("parts0-16-True", "parts1-32-False")
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_a_sum_with_a_base_in_float32_is_rounded_once(parts, rank, scales):
    """To half of a unit of bfloat16's last place, whatever the base's size."""
    arrays = residual, _, _, _, b, products, _, _ = operands(parts, rank, jnp.bfloat16)
    wide = operands(parts, rank, jnp.float32)[1]
    base, wide = scaled(wide) if scales else (wide, wide)
    total = np.asarray(exact((residual, wide, *arrays[2:]), parts)[0])
    for found in (
        low_rank_add(base, products, b, parts=parts, residual=residual, implementation="xla"),
        triton.add(residual, base, products, b, parts, config.add_config(rank), True),
    ):
        assert found.dtype == jnp.bfloat16
        assert (np.abs(np.asarray(found, np.float64) - total) <= 2.0**-8 * np.abs(total) + 1e-5).all()


@pytest.mark.exhaustive("parts0-16")
@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_scales_that_are_left_to_the_sum_change_no_bit(parts, rank):
    residual, base, _, _, b, products, _, _ = operands(parts, rank, jnp.bfloat16)
    apart, plain = scaled(base)
    for own in (residual, None):
        options = {"parts": parts, "residual": own, "implementation": "xla"}
        found, expected = (low_rank_add(array, products, b, **options) for array in (apart, plain))
        np.testing.assert_array_equal(found, expected)
        tiles = config.add_config(rank)
        found, expected = (triton.add(own, array, products, b, parts, tiles, True) for array in (apart, plain))
        np.testing.assert_array_equal(found, expected)


def rows_and_absmax(dy):
    """Rows of very different sizes, and their largest magnitudes."""
    dy = dy * jnp.asarray(np.exp2(np.arange(dy.shape[0]) % 60 - 30.0), dy.dtype)[:, None]
    return dy, jnp.max(jnp.abs(dy), axis=1).astype(jnp.float32)


@pytest.mark.exhaustive("parts0-16")
@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_rows_are_rounded_bit_for_bit_where_their_products_are_made(parts, rank):
    b, (dy, absmax) = operands(parts, rank, jnp.bfloat16)[4], rows_and_absmax(operands(parts, rank, jnp.bfloat16)[6])
    expected = quantize_rows(dy)
    wide = np.asarray(dy, np.float64)[:, :, None] * np.asarray(b, np.float64)[None]
    ends = np.cumsum([0, *parts])
    exact = np.concatenate([wide[:, i:j].sum(1) for i, j in zip(ends, ends[1:], strict=False)], axis=1)
    size = np.concatenate([np.abs(wide[:, i:j]).sum(1) for i, j in zip(ends, ends[1:], strict=False)], axis=1)
    tiles = config.round_config(rank)
    for products, rows in (
        low_rank_round_rows(dy, absmax, b, parts=parts, implementation="xla"),
        triton.round_rows(dy, absmax, b, parts, tiles, True),
        triton.round_rows(dy, absmax, b, parts, dataclasses.replace(tiles, columns=32, loop=2), True),
    ):
        jax.tree.map(np.testing.assert_array_equal, rows, expected)
        assert products.dtype == dy.dtype
        assert (np.abs(np.asarray(products, np.float64) - exact) <= 2.0**-8 * size).all()  # one rounding


@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_rows_are_rounded_bit_for_bit_beside_the_gradients_behind_B(parts, rank):
    arrays = operands(parts, rank, jnp.bfloat16)
    b, products, (dy, absmax) = arrays[4], arrays[5], rows_and_absmax(arrays[6])
    tiles, options = config.output_config((9, 0)), {"parts": parts, "implementation": "xla"}
    for found, plain in (
        (
            low_rank_output_gradients(dy, products, b, absmax=absmax, **options),
            low_rank_output_gradients(dy, products, b, **options),
        ),
        (
            triton.output_gradients(dy, products, b, parts, absmax, tiles, True),
            triton.output_gradients(dy, products, b, parts, None, tiles, True),
        ),
    ):
        jax.tree.map(np.testing.assert_array_equal, found, (*plain[:2], quantize_rows(dy)))
        assert plain[2] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": (64, 64)}, r"parts must add up .* \(64, 64\), \[192, 64\]"),
        ({"products": jnp.ones((192, 8))}, r"rank 16, products must be \[192, 16\], got \[192, 8\]"),
        ({"lora_B": jnp.ones((32, 16))}, r"lora_B must be \[64, R\], got \[32, 16\]"),
        ({"residual": jnp.ones((192, 32))}, r"residual must be float32\[192, 64\], got float32\[192, 32\]"),
        ({"base": jnp.ones((192, 64), jnp.bfloat16)}, "base must be in float32 like products"),
        ({"lora_B": jnp.ones((64, 16), jnp.bfloat16)}, "one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    _, base, _, _, b, products, _, _ = operands((64,), 16, jnp.float32)
    arguments = {"base": base, "products": products, "lora_B": b, "parts": (64,), **change}
    with pytest.raises(ValueError, match=message):
        low_rank_add(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "rank"), [((4096, 1024, 1024), 16), ((4096,), 32)])
def test_on_a_card(parts, rank):
    arrays = operands(parts, rank, jnp.bfloat16, 2048, 4096)
    run = jax.jit(results, static_argnums=(1, 2))
    found = run(arrays, parts, "triton") if len(parts) * rank in RANKS else run(arrays, parts)
    # one rounding to bfloat16; XLA, which takes the gradients of ranks that no tile has, rounds the product too
    close(found, exact(arrays, parts), 2**-9 if len(parts) * rank in RANKS else 2**-8)
    again = run(arrays, parts, None)
    assert all(bool(jnp.array_equal(one, other)) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": (64, 64)}, r"low_rank_round_rows: parts must add up .* \(64, 64\), \[192, 64\]"),
        ({"absmax": jnp.ones(64)}, r"absmax must be float32\[192\], got float32\[64\]"),
        ({"lora_B": jnp.ones((64, 16))}, "one dtype"),
    ],
)
def test_rows_to_be_rounded_that_do_not_fit_are_refused(change, message):
    arguments = {"dy": jnp.ones((192, 64), jnp.bfloat16), "absmax": jnp.ones(192), "parts": (64,)}
    with pytest.raises(ValueError, match=message):
        low_rank_round_rows(**{**arguments, "lora_B": jnp.ones((64, 16), jnp.bfloat16), **change})


@pytest.mark.gpu
def test_rows_are_rounded_bit_for_bit_beside_the_gradients_behind_B_on_a_card():
    arrays, parts = operands((4096, 1024, 1024), 16, jnp.bfloat16, 2048, 64), (4096, 1024, 1024)
    b, products, (dy, absmax) = arrays[4], arrays[5], rows_and_absmax(arrays[6])
    run = jax.jit(
        lambda absmax: low_rank_output_gradients(dy, products, b, parts=parts, absmax=absmax, implementation="triton")
    )
    plain = run(None)
    expected = quantize_rows(dy, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, run(absmax), (*plain[:2], expected))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", RANKS)
def test_rows_are_rounded_bit_for_bit_on_a_card(rank):
    arrays = operands((14336, 14336), rank, jnp.bfloat16, 2048, 64)
    b, (dy, absmax) = arrays[4], rows_and_absmax(arrays[6])
    options = {"parts": (14336, 14336), "implementation": "triton"}
    products, rows = jax.jit(lambda *operands: low_rank_round_rows(*operands, **options))(dy, absmax, b)
    jax.tree.map(np.testing.assert_array_equal, rows, quantize_rows(dy, implementation="xla"))
    halves = zip(jnp.split(dy, 2, axis=1), jnp.split(b, 2), strict=True)
    exact = jnp.concatenate([jnp.dot(d, half, preferred_element_type=jnp.float32) for d, half in halves], axis=1)
    size = np.asarray(absmax)[:, None] * 14336**0.5
    assert (np.abs(np.asarray(products, np.float64) - np.asarray(exact, np.float64)) <= 2.0**-8 * size).all()


@pytest.mark.gpu
def test_scales_that_are_left_to_the_sum_change_no_bit_on_a_card():
    residual, base, _, _, b, products, _, _ = operands((4096,), 16, jnp.bfloat16, 2048, 4096)
    run = jax.jit(
        lambda base: low_rank_add(base, products, b, parts=(4096,), residual=residual, implementation="triton")
    )
    found, expected = map(run, scaled(base))
    np.testing.assert_array_equal(found, expected)
