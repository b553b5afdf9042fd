"""Queries, keys and values out of one product: both implementations against float64, value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.split_rope import reference, split_rope, triton, xla
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.resources import of_triton

HEADS, KEY_HEADS = 6, 2
#: tokens of a row, head size, features that turn, whether pairs are neighbours, whether queries are scaled
CASES = {
    "whole heads": (8, 16, 16, False, False),
    "part of a head, scaled": (8, 32, 8, False, True),
    "neighbours": (8, 32, 16, True, False),
    "padded": (7, 48, 24, True, True),
    "no turn": (7, 48, 0, False, False),
}


def operands(tokens, size, turning, interleaved, scaled, dtype=jnp.bfloat16, heads=(HEADS, KEY_HEADS), rows=2):
    """The product, the gradients of its parts, tables, scales."""
    rng = np.random.default_rng(tokens + size)
    angles = rng.uniform(0, 6, (2, rows, tokens, turning // 2))

    def make(*shape):
        return jnp.asarray(rng.standard_normal((rows, tokens, *shape)), dtype)

    qkv = make((heads[0] + 2 * heads[1]) * size)
    gradients = tuple(make(count, size) for count in (heads[0], heads[1], heads[1]))
    tables = (
        tuple(jnp.asarray(table[0], jnp.float32) for table in (np.cos(angles), np.sin(angles))) if turning else None
    )
    scales = jnp.asarray(rng.choice([0.5, 2.0, 4.0], (rows, tokens)), jnp.float32) if scaled else None
    return qkv, gradients, tables, scales


def differentiated(function, qkv, gradients, tables, scales, *, heads=(HEADS, KEY_HEADS), **options):
    """Queries, keys, values and the gradient of the product."""
    cos, sin = (None, None) if tables is None else tables
    options |= {"heads": heads[0], "key_heads": heads[1], "query_scales": scales}
    values, pullback = jax.vjp(lambda qkv: function(qkv, cos, sin, **options), qkv)
    return *values, *pullback(gradients)


def assert_rounded_once(found, arrays, **options):
    """Against float64; the tests' scales are powers of two."""
    dtype = arrays[0].dtype
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: array.astype(jnp.float64), arrays)
        expected = differentiated(reference.split_rope, *wide, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        # half a unit in the last place; float32 products and sums before
        tolerance = 1.01 * float(jnp.finfo(dtype).eps) / 2
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=tolerance, atol=1e-6)


@pytest.mark.exhaustive("part of a head, scaled", "padded", "no turn")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradient_match_float64(case):
    arrays, interleaved = operands(*case), case[3]
    kernel = {"interleaved": interleaved, "tiles": triton.Tiles(4, 2, 4), "interpret": True}

    @jax.jit
    def both(qkv, gradients, tables, scales):
        operation = differentiated(split_rope, qkv, gradients, tables, scales, interleaved=interleaved)
        forward = triton.forward(qkv, tables, scales, (HEADS, KEY_HEADS), **kernel)
        return operation, (*forward, triton.backward(gradients, tables, scales, **kernel)[0])

    for found in both(*arrays):
        assert_rounded_once(found, arrays, interleaved=interleaved)


@pytest.mark.exhaustive("padded", "no turn")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_largest_for_each_token_is_that_of_what_is_written(case):
    (_, gradients, tables, scales), interleaved = operands(*case), case[3]
    kernel = functools.partial(triton.backward, tiles=triton.Tiles(4, 2, 4), interpret=True)
    for backward in (kernel, xla.backward):
        plain = backward(gradients, tables, scales, interleaved=interleaved)
        found, absmax = backward(gradients, tables, scales, interleaved=interleaved, with_absmax=True)
        np.testing.assert_array_equal(found, plain[0])
        assert plain[1] is None and absmax.dtype == jnp.float32
        np.testing.assert_array_equal(absmax, np.abs(np.asarray(found, np.float32)).max(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize(
    "case, heads",
    [*((case, (HEADS, KEY_HEADS)) for case in CASES.values()), ((501, 128, 128, False, False), (32, 8))],
    ids=[*CASES, "many heads"],
)
def test_on_the_card(case, heads, implementation):
    arrays, options = operands(*case, heads=heads), {"interleaved": case[3], "heads": heads}
    found = jax.jit(lambda *arrays: differentiated(split_rope, *arrays, implementation=implementation, **options))
    assert_rounded_once(found(*arrays), arrays, **options)


def test_residuals_are_the_tables_and_scales():
    qkv, _, (cos, sin), scales = operands(8, 32, 8, False, True)
    options = {"heads": HEADS, "key_heads": KEY_HEADS, "query_scales": scales}
    _, pullback = jax.vjp(lambda qkv: split_rope(qkv, cos, sin, **options), qkv)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(pullback)) == [scales.shape, cos.shape, sin.shape]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 7}, r"\(H \+ 2K\) · D\] for H = 7 and K = 2, got \[2, 8, 320\]"),
        ({"sin": None}, "cos and sin must be given together"),
        ({"cos": jnp.ones((2, 7, 4))}, r"at most \(2, 8, 16\) for a head size of 32, got cos \(2, 7, 4\)"),
        ({"cos": jnp.ones((2, 8, 17)), "sin": jnp.ones((2, 8, 17))}, r"at most \(2, 8, 16\)"),
        ({"query_scales": jnp.ones(8)}, r"query_scales must be \[2, 8\], got \[8\]"),
    ],
    ids=["heads", "one table", "length", "too many pairs", "scales"],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    qkv, _, (cos, sin), _ = operands(8, 32, 8, False, False)
    with pytest.raises(ValueError, match=message):
        split_rope(**{"qkv": qkv, "cos": cos, "sin": sin, "heads": HEADS, "key_heads": KEY_HEADS} | change)


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive("h200")
@pytest.mark.parametrize(
    "card, heads, size, turning, interleaved",
    [("h200", (32, 8), 128, 128, False), ("a100-80", (16, 8), 256, 128, True), ("4090", (14, 2), 80, 32, False)],
    ids=["h200", "a100-80", "4090"],
)
def test_nothing_leaves_the_registers(card, heads, size, turning, interleaved, tmp_path):
    aot = AOT(card)
    rows = (4, 2048)
    qkv = aot.spec((*rows, (heads[0] + 2 * heads[1]) * size), jnp.bfloat16)
    gradients = tuple(aot.spec((*rows, count, size), jnp.bfloat16) for count in (heads[0], heads[1], heads[1]))
    tables = tuple(aot.spec((*rows, turning // 2), jnp.float32) for _ in range(2))
    options = {"heads": heads, "interleaved": interleaved, "implementation": "triton"}
    used = of_triton(
        aot,
        lambda *arrays: differentiated(split_rope, *arrays, **options),
        qkv,
        gradients,
        tables,
        aot.spec(rows, jnp.float32),
        folder=tmp_path,
    )
    if used is not None:
        assert used.spill_bytes == used.stack_bytes == 0
        assert used.registers <= 168  # three programs of 128 threads on a multiprocessor
