"""The gated product between adapters: XLA against float64 by differentiation, Triton in the interpreter against XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8 import matmul, quantize_rows
from pallas_kernels.glu.lora import (
    Inner,
    config,
    glu_lora_backward,
    glu_lora_forward,
    reference,
    triton,
)
from pallas_kernels.tiles import padded_rank
from tests.support.close import close
from tests.support.scaled import scaled

ROWS, FEATURES = 128, 192
#: rank of gate and up, whether they share a rank product, rank of down; 0: no adapter
CASES = [(16, False, 32), (32, True, 16), (16, False, 0), (0, False, 16), (0, False, 0)]


def operands(rank, shared, down, dtype, rows=ROWS, features=FEATURES, make=None):
    """gate_up, products, B, dh, A, dproducts; None where there is no adapter."""
    rng = np.random.default_rng(0)
    make = make or (lambda shape, scale: jnp.asarray(scale * rng.standard_normal(shape), dtype))
    return (
        make((rows, 2 * features), 1.0),
        make((rows, rank if shared else 2 * rank), 1.0) if rank else None,
        make((2, features, rank), 0.3) if rank else None,
        make((rows, features), 1.0),
        make((down, features), 0.3) if down else None,
        make((rows, down), 0.3) if down else None,
    )


def exact(arrays, activation):
    """The arrays of `results` in float64 by differentiation."""
    with jax.enable_x64(True):
        gate_up, products, b, dh, a, dproducts = (None if v is None else v.astype(jnp.float64) for v in arrays)
        (h, down_products), pullback = jax.vjp(
            lambda *args: reference.glu_lora(*args, activation=activation), gate_up, products, b, a
        )
        dgate_up, _, db, da = pullback((dh, dproducts))
    return h, down_products, dgate_up, None if rank_of(arrays) else h, db, da


def rank_of(arrays):
    """The largest rank; 0: there is no adapter."""
    return max(0 if arrays[place] is None else arrays[place].shape[axis] for place, axis in ((2, 2), (4, 0)))


def results(gate_up, products, b, dh, a, dproducts, activation, implementation=None):
    inner = None if products is None else Inner(products, b)
    h, down_products = glu_lora_forward(gate_up, inner, a, activation=activation, implementation=implementation)
    down = None if a is None else (a, dproducts)
    options = {"activation": activation, "with_h": inner is None and a is None, "implementation": implementation}
    *backward, _ = glu_lora_backward(gate_up, inner, dh, down, **options)
    return h, down_products, *backward


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_xla_matches_float64(case, activation):
    arrays = operands(*case, jnp.float32)
    found = jax.jit(results, static_argnums=(6,))(*arrays, activation)
    # float32, sums of up to 192 products
    close(found, exact(arrays, activation), 1e-6)


@pytest.mark.exhaustive(
    "capability1-silu-case0", "capability1-silu-case1", "capability1-silu-case3", "capability0-relu-case2"
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", config.ACTIVATIONS[:1] + config.ACTIVATIONS[3:4] + config.ACTIVATIONS[-1:])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_triton_in_the_interpreter_matches_float64(case, activation, capability):
    gate_up, products, b, dh, a, dproducts = arrays = operands(*case, jnp.bfloat16)
    rank = rank_of(arrays)
    tiles = config.forward_config(capability, rank), config.backward_config(capability, rank)
    forward = triton.forward(gate_up, products, b, a, activation, tiles=tiles[0], interpret=True)
    options = {"with_h": not rank, "tiles": tiles[1], "interpret": True}
    *backward, _ = triton.backward(gate_up, products, b, dh, a, dproducts, activation, **options)
    # two roundings to bfloat16, each of at most 2^-9: of the terms summed over features or tokens, and of the result
    close((*forward, *backward), exact(arrays, activation), 2**-8.5)


def test_a_run_of_several_tiles_is_added_up():
    """More tiles than a program goes over, in numbers that the loop does not divide."""
    arrays = gate_up, products, b, dh, a, dproducts = operands(
        16, False, 16, jnp.bfloat16, rows=5 * 64, features=3 * 64
    )
    options = {"activation": "silu", "tiles": config.Tiles(64, 64, 2, 4, 1), "interpret": True}
    forward = triton.forward(gate_up, products, b, a, **options)
    *backward, _ = triton.backward(gate_up, products, b, dh, a, dproducts, **options)
    close((*forward, *backward), exact(arrays, "silu"), 2**-8.5)


@pytest.mark.exhaustive("case0")
@pytest.mark.parametrize("case", CASES)
def test_scales_that_are_left_to_the_reader_change_no_bit(case):
    gate_up, products, b, dh, a, dproducts = arrays = operands(*case, jnp.bfloat16)
    (gate_up, plain), (dh, plain_dh) = scaled(gate_up, 1), scaled(dh, 2)
    rank, inner = rank_of(arrays), None if products is None else Inner(products, b)
    tiles = config.forward_config((9, 0), rank), config.backward_config((9, 0), rank)
    options = {"activation": "silu", "implementation": "xla"}
    expected = glu_lora_forward(plain, inner, a, **options)
    jax.tree.map(np.testing.assert_array_equal, glu_lora_forward(gate_up, inner, a, **options), expected)
    found, expected = (
        triton.forward(x, products, b, a, "silu", tiles=tiles[0], interpret=True) for x in (gate_up, plain)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    down = None if a is None else (a, dproducts)
    options = {"activation": "silu", "with_h": not rank, "implementation": "xla"}
    expected = glu_lora_backward(plain, inner, plain_dh, down, **options)
    jax.tree.map(np.testing.assert_array_equal, glu_lora_backward(gate_up, inner, dh, down, **options), expected)
    options = {"with_h": not rank, "tiles": tiles[1], "interpret": True}
    found = triton.backward(gate_up, products, b, dh, a, dproducts, "silu", **options)
    expected = triton.backward(plain, products, b, plain_dh, a, dproducts, "silu", **options)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.exhaustive("case0")
@pytest.mark.parametrize("case", CASES)
def test_the_largest_of_each_row_of_the_gradient_is_that_of_what_is_written(case):
    gate_up, products, b, dh, a, dproducts = arrays = operands(*case, jnp.bfloat16)
    dh = dh * jnp.asarray(np.exp2(np.arange(ROWS) % 40 - 20.0), jnp.bfloat16)[:, None]
    inner, down = None if products is None else Inner(products, b), None if a is None else (a, dproducts)
    tiles, options = config.backward_config((9, 0), rank_of(arrays)), {"activation": "silu", "implementation": "xla"}
    without = glu_lora_backward(gate_up, inner, dh, down, **options)
    kernel = functools.partial(triton.backward, activation="silu", tiles=tiles, interpret=True)
    for found, plain in (
        (glu_lora_backward(gate_up, inner, dh, down, with_absmax=True, **options), without),
        tuple(kernel(gate_up, products, b, dh, a, dproducts, with_absmax=widest) for widest in (True, False)),
    ):
        jax.tree.map(np.testing.assert_array_equal, found[:4], tuple(plain[:4]))
        assert plain[4] is None and found[4].dtype == jnp.float32
        np.testing.assert_array_equal(found[4], np.abs(np.asarray(found[0], np.float32)).max(1))


@pytest.mark.exhaustive("case0")
@pytest.mark.parametrize("case", CASES)
def test_h_in_float8_is_h_with_its_rows_rounded(case):
    """The kernel rounds each tile by its own scale first: only codes below the row's least normal number may differ."""
    gate_up, products, b, _, a, _ = arrays = operands(*case, jnp.bfloat16)
    magnitudes = np.exp2(np.arange(2 * FEATURES) // 64 % 3 * 4.0 - 6)
    gate_up = jnp.asarray(np.asarray(gate_up, np.float32) * magnitudes, jnp.bfloat16).at[3].set(0.0)
    inner, tiles = None if products is None else Inner(products, b), config.forward_config((9, 0), rank_of(arrays))
    options = {"activation": "silu", "implementation": "xla"}
    plain = glu_lora_forward(gate_up, inner, a, **options)
    found = glu_lora_forward(gate_up, inner, a, rounded=True, **options)
    jax.tree.map(np.testing.assert_array_equal, found, (quantize_rows(plain[0]), plain[1]))
    kernel = functools.partial(triton.forward, gate_up, products, b, a, "silu", tiles=tiles, interpret=True)
    plain, (h, through) = kernel(), kernel(rounded=True)
    jax.tree.map(np.testing.assert_array_equal, through, plain[1])
    expected = quantize_rows(plain[0])
    np.testing.assert_array_equal(h.scales, expected.scales)
    codes, once = (np.asarray(rows.codes, np.float64) for rows in (h, expected))
    assert (codes == once)[np.abs(once) >= 2.0**-6].all() and np.abs(codes - once).max() <= 2.0**-9
    assert not rank_of(arrays) or (np.abs(once) < 2.0**-6).any()


def test_h_that_is_not_finite_stays_so_in_float8():
    gate_up = jnp.ones((64, 256), jnp.bfloat16).at[0, 3].set(jnp.nan).at[1, 100].set(jnp.inf)
    tiles = config.forward_config((9, 0), 0)
    for h in (
        glu_lora_forward(gate_up, None, None, activation="silu", rounded=True)[0],
        triton.forward(gate_up, None, None, None, "silu", True, tiles, True)[0],
    ):
        product = matmul(*h, *quantize_rows(jnp.ones((16, 128), jnp.bfloat16)))
        assert np.isfinite(np.asarray(product, np.float32)).all(1).tolist() == [False] * 2 + [True] * 62


def test_ranks_are_padded_to_what_kernels_serve():
    assert [padded_rank(rank) for rank in (1, 16, 17, 64, 65, 128, 130)] == [16, 16, 32, 64, 128, 128, 130]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "mish"}, "activation must be one of"),
        ({"gate_up": jnp.ones((8, 7))}, "gate and up must be one array"),
        ({"inner": Inner(jnp.ones((8, 3)), jnp.ones((2, 4, 2)))}, r"products \[8, 2R\] or \[8, R\]"),
        ({"down_A": jnp.ones((2, 5))}, r"down_A must be \[R, 4\]"),
        ({"down_A": jnp.ones((2, 4), jnp.bfloat16)}, "one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"gate_up": jnp.ones((8, 8)), "inner": None, "down_A": None, "activation": "silu", **change}
    with pytest.raises(ValueError, match=message):
        glu_lora_forward(**arguments)


@pytest.mark.gpu
def test_scales_that_are_left_to_the_reader_change_no_bit_on_a_card():
    gate_up, products, b, dh, a, dproducts = operands(16, False, 16, jnp.bfloat16, 2048, 4096)
    options = {"activation": "silu", "implementation": "triton"}

    @jax.jit
    def both(gate_up, dh):
        h, through = glu_lora_forward(gate_up, Inner(products, b), a, **options)
        return h, through, glu_lora_backward(gate_up, Inner(products, b), dh, (a, dproducts), **options)

    pairs = zip(scaled(gate_up, 1), scaled(dh, 2), strict=True)
    found, expected = (both(*pair) for pair in pairs)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 64])
def test_what_float8_products_read_on_a_card(rank):
    """h in float8 beside its rows rounded, and the largest of each row of the gradient."""
    gate_up, products, b, dh, a, dproducts = operands(rank, False, rank, jnp.bfloat16, 2048, 14336)
    inner, options = Inner(products, b), {"activation": "silu", "implementation": "triton"}
    (gate_up, _), (dh, _) = scaled(gate_up, 1), scaled(dh, 2)
    plain = jax.jit(lambda x: glu_lora_forward(x, inner, a, **options))(gate_up)
    h, through = jax.jit(lambda x: glu_lora_forward(x, inner, a, rounded=True, **options))(gate_up)
    np.testing.assert_array_equal(through, plain[1])
    expected = quantize_rows(plain[0])
    np.testing.assert_array_equal(h.scales, expected.scales)
    codes, once = (np.asarray(rows.codes, np.float32) for rows in (h, expected))
    assert (codes == once)[np.abs(once) >= 2.0**-6].all() and np.abs(codes - once).max() <= 2.0**-9
    backward = jax.jit(lambda x, dh: glu_lora_backward(x, inner, dh, (a, dproducts), with_absmax=True, **options))
    found = backward(gate_up, dh)
    np.testing.assert_array_equal(found.absmax, np.abs(np.asarray(found.gate_up, np.float32)).max(1))
