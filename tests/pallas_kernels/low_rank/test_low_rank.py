"""Sums with low-rank products: XLA against float64 by differentiation, Triton in the interpreter against the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.float8 import Scaled
from pallas_kernels.low_rank import (
    ADD,
    INPUT,
    OUTPUT,
    Case,
    config,
    low_rank_add,
    low_rank_input_gradients,
    low_rank_output_gradients,
    reference,
    triton,
)
from pallas_kernels.tiles import RANKS
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.resources import of_triton
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
        *low_rank_output_gradients(dy, products, b, parts=parts, **options),
        *low_rank_input_gradients(dx, x, products, a, **options),
    )


def close(found, expected, tolerance):
    """By the norm of the difference."""
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) < tolerance * np.linalg.norm(theirs)


@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_xla_matches_float64(parts, rank):
    arrays = operands(parts, rank, jnp.float32)
    # float32, sums of up to 256 products
    close(jax.jit(results, static_argnums=(1,))(arrays, parts), exact(arrays, parts), 1e-6)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_triton_in_the_interpreter_matches_float64(parts, rank, capability):
    arrays = residual, base, x, a, b, products, dy, dx = operands(parts, rank, jnp.bfloat16)
    found = [triton.add(residual, base, products, b, parts, config.add_config(capability, rank), True)]
    found += triton.output_gradients(dy, products, b, parts, config.output_config(capability, rank), True)
    found += triton.input_gradients(dx, x, products, a, config.input_config(capability, rank), True)
    # one rounding to bfloat16, of the results that have it
    close(found, exact(arrays, parts), 2**-9)
    alone = triton.add(None, base, products, b, parts, config.add_config(capability, rank), True)
    close([alone], [exact((jnp.zeros_like(residual), *arrays[1:]), parts)[0]], 2**-9)


@pytest.mark.parametrize(("parts", "rank"), CASES)
def test_scales_that_are_left_to_the_sum_change_no_bit(parts, rank):
    residual, base, _, _, b, products, _, _ = operands(parts, rank, jnp.bfloat16)
    apart, plain = scaled(base)
    for own in (residual, None):
        options = {"parts": parts, "residual": own, "implementation": "xla"}
        found, expected = (low_rank_add(array, products, b, **options) for array in (apart, plain))
        np.testing.assert_array_equal(found, expected)
        tiles = config.add_config((9, 0), rank)
        found, expected = (triton.add(own, array, products, b, parts, tiles, True) for array in (apart, plain))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.newer_world
def test_nothing_spills_where_scales_are_left_to_the_sum(tmp_path):
    aot = AOT("h200")
    large, (rows, columns) = aot.spec((8192, 4096), jnp.bfloat16), (aot.spec((n,), jnp.float32) for n in (8192, 4096))
    others = [aot.spec(shape, jnp.bfloat16) for shape in ((8192, 16), (4096, 16))]

    def add(base, rows, columns, products, b, residual):
        options = {"parts": (4096,), "residual": residual, "implementation": "triton"}
        return low_rank_add(Scaled(base, rows, columns), products, b, **options)

    found = of_triton(aot, add, large, rows, columns, *others, large, folder=tmp_path)
    assert found is None or found.spill_bytes == 0


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.both_worlds("32-h200", others="newer_world")
@pytest.mark.parametrize("card", ["h200", "a100-80"])
@pytest.mark.parametrize("rank", RANKS[1:])
def test_nothing_spills(card, rank, tmp_path):
    aot, parts = AOT(card), (4096,)
    specs = operands(parts, rank, None, 8192, 4096, lambda shape, scale: aot.spec(shape, jnp.bfloat16))
    chosen = None if rank > config.LARGEST_OUTPUT_RANK else "triton"
    found = of_triton(aot, lambda *arrays: results(arrays, parts, chosen), *specs, folder=tmp_path)
    assert found is None or found.spill_bytes == 0


@needs_cuda_plugin
def test_what_triton_leaves_to_xla_and_why():
    with AOT("h200").abstract_device():
        target = dispatch.target()
        assert ADD.reasons(Case(target, 64, (128,), jnp.bfloat16, 128))["triton"] is None
        assert "float32" in ADD.reasons(Case(target, 64, (128,), jnp.float32, 16))["triton"]
        assert "not 48" in INPUT.reasons(Case(target, 64, (128,), jnp.bfloat16, 48))["triton"]
        assert "not 64 tokens by [128, 96]" in ADD.reasons(Case(target, 64, (128, 96), jnp.bfloat16, 16))["triton"]
        assert "second pass over dy" in OUTPUT.reasons(Case(target, 64, (128,), jnp.bfloat16, 64))["triton"]


def test_a_forced_implementation_is_never_another():
    arrays = operands((64,), 16, jnp.float32)
    with pytest.raises(NotImplementedError, match="'triton' cannot serve this call"):
        results(arrays, (64,), "triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": (64, 64)}, r"parts must add up .* \(64, 64\), \[192, 64\]"),
        ({"products": jnp.ones((192, 8))}, r"products \[192, 1·R\], got \[64, 16\] and \[192, 8\]"),
        ({"residual": jnp.ones((192, 32))}, r"residual must be float32\[192, 64\] like base"),
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


@pytest.mark.gpu
def test_scales_that_are_left_to_the_sum_change_no_bit_on_a_card():
    residual, base, _, _, b, products, _, _ = operands((4096,), 16, jnp.bfloat16, 2048, 4096)
    run = jax.jit(
        lambda base: low_rank_add(base, products, b, parts=(4096,), residual=residual, implementation="triton")
    )
    found, expected = map(run, scaled(base))
    np.testing.assert_array_equal(found, expected)
