"""Queries, keys and values out of one product: both implementations against float64, value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.split_rope import reference, split_rope, triton
from pallas_kernels.split_rope.config import Tiles

HEADS, KEY_HEADS = 6, 2
#: tokens, head size, features that turn, whether pairs are neighbours, whether queries are scaled
CASES = {
    "whole heads": (16, 16, 16, False, False),
    "part of a head": (16, 32, 8, False, True),
    "neighbours": (16, 32, 16, True, False),
    "padded": (13, 48, 24, True, True),
    "no turn": (13, 48, 0, False, False),
}


def operands(tokens, size, turning, interleaved, scaled, dtype):
    rng = np.random.default_rng(tokens + size)
    angles = rng.uniform(0, 6, (2, tokens, turning // 2))

    def make(*shape):
        return jnp.asarray(rng.standard_normal((2, tokens, *shape)), dtype)

    qkv = make((HEADS + 2 * KEY_HEADS) * size)
    gradients = tuple(make(count, size) for count in (HEADS, KEY_HEADS, KEY_HEADS))
    tables = tuple(jnp.asarray(table, jnp.float32) for table in (np.cos(angles), np.sin(angles))) if turning else None
    scales = jnp.asarray(rng.choice([0.5, 2.0, 4.0], (2, tokens)), jnp.float32) if scaled else None
    return qkv, gradients, tables, scales


def interpreted(qkv, gradients, tables, scales, interleaved):
    static = triton.Static((HEADS, KEY_HEADS), interleaved, Tiles(4, 2, 4), interpret=True)
    return *triton.forward(qkv, tables, scales, static), triton.backward(gradients, tables, scales, static)


def differentiated(function, qkv, gradients, tables, scales, interleaved, **options):
    cos, sin = (None, None) if tables is None else tables
    options |= {"heads": HEADS, "key_heads": KEY_HEADS, "interleaved": interleaved, "query_scales": scales}
    values, pullback = jax.vjp(lambda qkv: function(qkv, cos, sin, **options), qkv)
    return *values, *pullback(gradients)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradient_match_float64(case, dtype):
    arrays, interleaved = operands(*case, dtype), case[3]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: array.astype(jnp.float64), arrays)
        expected = differentiated(reference.split_rope, *wide, interleaved)
    xla = jax.jit(lambda *arrays: differentiated(split_rope, *arrays, interleaved, implementation="xla"))(*arrays)
    kernels = interpreted(*arrays, interleaved)
    # rounded once, the scales being powers of two
    tolerance = 1.01 * float(jnp.finfo(dtype).eps) / 2
    for found in (xla, kernels):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == dtype
            np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=tolerance, atol=1e-6)
