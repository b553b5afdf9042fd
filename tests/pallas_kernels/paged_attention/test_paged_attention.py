"""Attention to pages: every implementation beside float64, fresh random inputs, poisoned pages."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, paged_attention, reference, triton

FEATURES = {
    "plain": {},
    "window": {"sliding_window": 37},
    "soft cap": {"logits_soft_cap": 5.0, "scale": 0.5},
    "sinks": {"sinks": True},
    "window and sinks": {"sliding_window": 1, "sinks": True},
}
SHAPES = {"grouped": (8, 2, 16, 16), "one key head": (3, 1, 32, 16), "as many": (4, 4, 16, 32)}


def inputs(dtype, heads, kv_heads, size, value_size, *, rows=5, pages=6, page=16, layers=2, held=None):
    rng = np.random.default_rng()
    count = rows * pages + 3
    lengths = np.concatenate([[0, 1, pages * page], rng.integers(1, pages * page, rows - 3)]).astype(np.int32)
    table = rng.permutation(count)[: rows * pages].reshape(rows, pages).astype(np.int32)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    keys, values = (draw(layers, count, kv_heads, page, each) for each in (size, value_size))
    for row, length in enumerate(lengths):  # whatever no row may read
        for index in range(pages):
            unused = slice(max(0, min(page, length - index * page)), None)
            keys[:, table[row, index], :, unused] = values[:, table[row, index], :, unused] = np.nan
        table[row, -(-length // page) :] = 2**30
    q, held = jnp.asarray(draw(rows, heads, size), dtype), dtype if held is None else held
    return q, jnp.asarray(keys, held), jnp.asarray(values, held), jnp.asarray(table), jnp.asarray(lengths)


def forward(name, splits):
    if name == "xla":
        return functools.partial(paged_attention, implementation="xla")

    def interpreted(q, keys, values, table, lengths, *, layer, sinks=None, scale=None, **features):
        features = {"sliding_window": None, "logits_soft_cap": None} | features
        options = api.Options(q.shape[-1] ** -0.5 if scale is None else scale, **features)
        return triton.forward(
            q, keys, values, table, lengths, jnp.int32(layer), sinks, options, splits=splits, interpret=True
        )

    return interpreted


@pytest.mark.exhaustive(
    *("plain-grouped-xla-1-bfloat16", "plain-grouped-triton-1-bfloat16"),
    *(f"{case}-grouped-xla-1-float32" for case in ("plain", "window", "soft cap", "window and sinks")),
    *(f"{case}-grouped-triton-3-bfloat16" for case in ("plain", "window", "soft cap", "window and sinks")),
    *(f"sinks-{shape}-xla-1-float32" for shape in ("grouped0", "one key head", "as many")),
    *(f"sinks-{shape}-triton-3-bfloat16" for shape in ("grouped0", "one key head", "as many")),
)
@pytest.mark.parametrize(
    "name, splits, dtype", [("xla", 1, "float32"), ("xla", 1, "bfloat16"), *(("triton", s, "bfloat16") for s in (1, 3))]
)
@pytest.mark.parametrize(
    ("features", "shape"), [*((name, "grouped") for name in FEATURES), *(("sinks", name) for name in SHAPES)]
)
def test_as_in_float64(name, splits, dtype, features, shape):
    arrays = inputs(dtype, *SHAPES[shape])
    options = dict(FEATURES[features])
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(np.random.default_rng().normal(size=SHAPES[shape][0]), jnp.float32)
    found = np.asarray(forward(name, splits)(*arrays, layer=1, **options), np.float64)
    expected = reference.paged_attention(*arrays, layer=1, **options)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 if dtype == "float32" else 3e-2)
    assert not found[0].any(), "a row without tokens"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_features_of_the_keys(dtype):
    q, keys, _, *rest = inputs(dtype, 4, 1, 32, 32)
    found = np.asarray(paged_attention(q, keys, 24, *rest, layer=1, implementation="xla"), np.float64)
    expected = reference.paged_attention(q, keys, keys[..., :24], *rest, layer=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 if dtype == "float32" else 3e-2)
    with pytest.raises(ValueError, match="expected 1 to 32 features of a key, got 33"):
        paged_attention(q, keys, 33, *rest)


@pytest.mark.parametrize("name, splits", [("xla", 1), ("triton", 2)])
def test_pages_in_float8_are_read_as_the_queries_dtype(name, splits):
    arrays = inputs("bfloat16", *SHAPES["grouped"], held=jnp.float8_e4m3fn)
    found = np.asarray(forward(name, splits)(*arrays, layer=1), np.float64)
    np.testing.assert_allclose(found, reference.paged_attention(*arrays, layer=1), rtol=0, atol=3e-2)
    with pytest.raises(ValueError, match="expected q's float32 or float8_e4m3fn, got bfloat16"):
        paged_attention(arrays[0].astype(jnp.float32), *(a.astype(jnp.bfloat16) for a in arrays[1:3]), *arrays[3:])
