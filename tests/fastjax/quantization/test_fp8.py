"""FP8 weights decode as the file format does, bit for bit; products with them equal products with decoded ones."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.formats import fp8
from fastjax.quantization import FP8Weight, MixedWeight, concatenate, dequantize, matmul, rows_of
from tests.support import tiny

BLOCK = (8, 16)


def tensor(kind, rows, columns, seed=0, code="float8_e4m3fn", own="float32"):
    """A packed matrix with scales by "blocks", "rows" or "one", that decodes to `own`."""
    rng = np.random.default_rng([seed, rows])
    codes = rng.standard_normal((rows, columns)).astype(getattr(ml_dtypes, code))
    size = {"blocks": (math.ceil(rows / BLOCK[0]), math.ceil(columns / BLOCK[1])), "rows": (rows, 1), "one": ()}[kind]
    scales = np.asarray(rng.uniform(0.01, 2, size), np.float32)
    return fp8.FP8Tensor(codes, fp8.make_scale("scale", scales, codes.shape, BLOCK, "file"), own)


@pytest.mark.exhaustive("36-rows2-float8_e4m3fn-blocks", "48-rows1-float8_e5m2-rows")
@pytest.mark.parametrize("kind", ["blocks", "rows", "one"])
@pytest.mark.parametrize("code", fp8.DTYPES)
@pytest.mark.parametrize("rows", [(24,), (16, 8, 8), (20, 5)])  # the last: blocks end within a part
@pytest.mark.parametrize("columns", [48, 36])
def test_decoding_equals_the_file_formats_bit_for_bit(kind, code, rows, columns):
    packed = [tensor(kind, n, columns, code=code) for n in rows]
    joined = concatenate([FP8Weight.from_tensor(one) for one in packed])
    assert isinstance(joined, FP8Weight) and joined.shape == (sum(rows), columns)
    expected = np.concatenate([fp8.decode(one.codes, one.scale) for one in packed])
    for dtype in (np.float32, ml_dtypes.bfloat16):
        assert np.array_equal(np.asarray(dequantize(joined, dtype)), expected.astype(dtype))
    start = 0
    for n, one in zip(rows, packed, strict=True):
        mine = rows_of(joined, slice(start, start + n))
        assert np.array_equal(np.asarray(dequantize(mine, jnp.float32)), fp8.decode(one.codes, one.scale))
        start += n


def test_whole_blocks_keep_their_scales():
    joined = concatenate([FP8Weight.from_tensor(tensor("blocks", n, 48)) for n in (16, 8)])
    assert joined.block == BLOCK and joined.scales.shape == (3, 3)


def test_formats_that_differ_lie_one_below_the_other():
    weights = [FP8Weight.from_tensor(tensor("rows", 8, 48, code=code)) for code in fp8.DTYPES]
    joined = concatenate([*weights, jnp.ones((8, 48), jnp.bfloat16)])
    assert isinstance(joined, MixedWeight) and matmul(jnp.ones((1, 2, 48)), joined).shape == (1, 2, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its layers' matrices in FP8."""
    return tiny.write_fp8_folder(tmp_path_factory.mktemp("fp8"), tiny.CONFIG, BLOCK)


def leaves(model):
    return {leaf.dtype for leaf in jax.tree.leaves(model.frozen if model.frozen is not None else model.trainable)}


@pytest.mark.exhaustive("scan")
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_a_folder_in_fp8_keeps_its_bits_and_says_what_its_values_say(folder, layer_loop):
    model = tiny.model(folder, tiny.CONFIG, layer_loop=layer_loop)
    assert jnp.dtype(jnp.float8_e4m3fn) in leaves(model)
    tokens = np.stack(tiny.documents(tiny.CONFIG, (20, 20)))
    decoded = tiny.model(folder, tiny.CONFIG, layer_loop=layer_loop, float32_modules=["layers"])
    assert jnp.dtype(jnp.float8_e4m3fn) not in leaves(decoded)
    # float32 both; dtype in config.json is float32, so nothing is rounded when the folder is decoded
    expected = tiny.logits(decoded, tokens)
    np.testing.assert_allclose(tiny.logits(model, tokens), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_what_is_quantised_further_or_trained_is_decoded(folder):
    for options in ({"load_in_4bit": True}, {"full_finetuning": True}):
        model = tiny.model(folder, tiny.CONFIG, **options)
        found = {leaf.dtype for tree in (model.frozen, model.trainable) for leaf in jax.tree.leaves(tree)}
        assert jnp.dtype(jnp.float8_e4m3fn) not in found
