"""Products with packed weights equal products with the same weights decoded, whatever their parts and formats."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.errors import ConvertError
from convert.formats import nf4
from fastjax.quantization import MixedWeight, NF4Weight, as_weight, concatenate, dequantize, matmul
from fastjax.quantization.float8 import in_float8
from fastjax.quantization.weights import decoded_scales
from pallas_kernels.float8 import scaled_values
from tests.support.aot import AOT, needs_cuda_plugin

#: (rows of the parts, columns): whole blocks a row; blocks that cross rows; an odd number of elements.
SHAPES = [((64, 32, 32), 128), ((24, 40), 72), ((3, 5), 21), ((7,), 64), ((300, 300), 64)]


@functools.cache
def tensors(rows, columns, nested):
    rng = np.random.default_rng(columns)
    return [nf4.encode(rng.standard_normal((n, columns)).astype(np.float32), nested=nested) for n in rows]


@pytest.mark.exhaustive("True-rows0-128", "True-rows1-72")
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("nested", [False, True])
def test_decoding_equals_the_file_formats_bit_for_bit(rows, columns, nested):
    packed = tensors(rows, columns, nested)
    joined = concatenate([NF4Weight.from_tensor(tensor) for tensor in packed])
    assert isinstance(joined, NF4Weight) == (columns % 64 == 0 or len(rows) == 1)
    assert as_weight(joined).shape == (sum(rows), columns)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        expected = np.concatenate([nf4.decode(tensor, dtype) for tensor in packed])
        assert np.array_equal(np.asarray(dequantize(joined, dtype)), expected)


@pytest.mark.exhaustive("float32-rows1-72", "bfloat16-rows0-128")
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_and_gradients_equal_those_of_the_decoded_matrix(rows, columns, dtype):
    joined = concatenate([NF4Weight.from_tensor(tensor) for tensor in tensors(rows, columns, True)])
    plain = dequantize(joined, dtype)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, columns)), dtype)
    out, pull = jax.vjp(lambda x: matmul(x, joined), x)
    expected, pull_plain = jax.vjp(lambda x: matmul(x, plain), x)
    dy = jnp.asarray(rng.standard_normal(out.shape), dtype)
    assert out.dtype == dtype
    # float32: order of sums; bfloat16: 8 bits, once for the result
    tolerance = {"rtol": 1e-2, "atol": 1e-2 * columns**0.5} if dtype == jnp.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, theirs in ((out, expected), (pull(dy)[0], pull_plain(dy)[0])):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), **tolerance)


@pytest.mark.parametrize("tokens", [3, 160])
def test_products_in_float32_are_not_rounded_to_the_inputs_dtype(tokens):
    """Of every kind of weight; a gradient through NF4's has the input's dtype."""
    packed = NF4Weight.from_tensor(tensors((24, 40), 64, True)[1])
    plain = packed.dequantize(jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, tokens, 64)), jnp.bfloat16)
    for weight in (packed, plain, MixedWeight((packed, plain)), in_float8(packed, False)):
        found = as_weight(weight).matmul_scaled(x, jnp.float32)
        expected = np.asarray(x, np.float64) @ np.asarray(dequantize(weight, jnp.bfloat16), np.float64).T
        assert found.dtype == jnp.float32 and as_weight(weight).matmul_scaled(x).dtype == jnp.bfloat16
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    rounded = as_weight(in_float8(packed)).matmul_scaled(x, jnp.float32)
    assert rounded.product.dtype == jnp.float32
    np.testing.assert_array_equal(
        scaled_values(rounded).astype(jnp.bfloat16), scaled_values(in_float8(packed).matmul_scaled(x)).astype(x.dtype)
    )
    product, pull = jax.vjp(lambda x: packed.matmul_into(x, jnp.float32), x)
    np.testing.assert_array_equal(pull(product)[0], packed.transposed(product.astype(x.dtype)))


@pytest.mark.exhaustive("shape0-False", "shape1-True", "shape2-False", "shape3-True", "shape4-True")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(40, 64), (9, 21), (5, 13), (257, 192), (512, 1024)])
def test_quantising_on_the_device_gives_the_codes_of_the_file_format(nested, shape):
    matrix = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    ours = jax.jit(functools.partial(NF4Weight.quantize, nested=nested))(matrix)
    theirs = NF4Weight.from_tensor(nf4.encode(matrix, nested=nested))
    assert ours.shape == theirs.shape and ours.parts == theirs.parts
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.array_equal(mine, other)


def test_formats_mix():
    """A "dynamic" folder keeps some projections in 16 bits: one product, several formats, no copy in 16 bits."""
    first, second = tensors((24, 40), 64, True)[0], tensors((24, 40), 64, False)[1]
    plain = np.random.default_rng(2).standard_normal((8, 64)).astype(ml_dtypes.bfloat16)
    parts = [NF4Weight.from_tensor(first), jnp.asarray(plain), NF4Weight.from_tensor(second)]
    mixed = concatenate(parts)
    assert isinstance(mixed, MixedWeight) and mixed.shape == (72, 64)
    expected = np.concatenate([nf4.decode(first, np.float32), plain.astype(np.float32), nf4.decode(second, np.float32)])
    assert np.array_equal(np.asarray(dequantize(mixed, jnp.float32)), expected)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, 4, 64)), jnp.float32)
    np.testing.assert_allclose(matmul(x, mixed)[0], x[0] @ expected.T, rtol=1e-5, atol=1e-5)
    assert isinstance(concatenate([jnp.zeros((2, 8)), jnp.zeros((3, 8), jnp.bfloat16)]), MixedWeight)


def test_values_of_another_map_are_kept():
    tensor = tensors((7,), 64, False)[0]
    other = NF4Weight.from_tensor(
        nf4.NF4Tensor(tensor.codes, tensor.absmax, np.linspace(-1, 1, 16, dtype=np.float32), tensor.shape, "float32")
    )
    assert other.quant_map is not None
    values = np.linspace(-1, 1, 16, dtype=np.float32)
    nibbles = np.stack([tensor.codes >> 4, tensor.codes & 15], 1).reshape(7, 64)
    assert np.array_equal(other.dequantize(jnp.float32), values[nibbles] * tensor.absmax[:, None])


def test_scales_of_different_maps_stay_apart():
    first, second = tensors((24, 40), 64, True)
    stretched = dataclasses.replace(second, nested_quant_map=second.nested_quant_map * np.float32(1.5))
    joined = concatenate([NF4Weight.from_tensor(first), NF4Weight.from_tensor(stretched)])
    expected = np.concatenate([nf4.decode(first, np.float32), nf4.decode(stretched, np.float32)])
    assert np.array_equal(np.asarray(dequantize(joined, jnp.float32)), expected)


@pytest.mark.parametrize("sizes", [{"blocksize": 128}, {"blocksize": 64, "nested_blocksize": 128}])
def test_blocks_of_another_size_are_refused(sizes):
    """bitsandbytes can write them; reading them as blocks of 64 and 256 would decode to something else."""
    blocks = 7 * 64 // sizes["blocksize"] + (7 * 64 % sizes["blocksize"] > 0)
    tensor = nf4.NF4Tensor(
        np.zeros(7 * 32, np.uint8),
        np.zeros(blocks, np.uint8),
        nf4.NF4_MAP,
        (7, 64),
        "float32",
        nested_absmax=np.ones(1, np.float32),
        nested_quant_map=np.zeros(256, np.float32),
        nested_offset=1.0,
        **sizes,
    )
    with pytest.raises(ConvertError, match="block"):
        NF4Weight.from_tensor(tensor)


def few_outputs(outputs, rows=32):
    """A weight of few outputs in NF4, the same decoded, and rows of x."""
    draw = np.random.default_rng(6).standard_normal
    weight = NF4Weight.quantize(jnp.asarray(draw((outputs, 512)), jnp.bfloat16))
    return weight, weight.dequantize(jnp.bfloat16), jnp.asarray(draw((rows, 512)), jnp.bfloat16)


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.parametrize("outputs, several", [(64, True), (96, False)])
def test_as_few_outputs_as_ranks_come_in_addends(outputs, several):
    *weights, x = few_outputs(outputs)
    weights.append(in_float8(weights[0]))
    with AOT("h100").tracing():
        shapes = [jax.eval_shape(lambda weight, x: as_weight(weight).addends(x), weight, x) for weight in weights]
    assert [(found.shape[0] > 1, found.shape[1:]) for found in shapes] == [
        (each, (32, outputs)) for each in (several, several, False)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_addends_of_few_outputs_are_their_product(rows):
    *weights, x = few_outputs(64, rows)
    expected = np.asarray(x, np.float64) @ np.asarray(weights[1], np.float64).T
    for weight in weights:
        found = jnp.sum(jax.jit(lambda weight, x: as_weight(weight).addends(x))(weight, x), axis=0)
        assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


def test_scales_decoded_once_are_those_of_each_product():
    """A weight of two parts, one in bitsandbytes' order, and stacked layers; other leaves stay."""
    draw = np.random.default_rng(5).standard_normal
    one, other = (NF4Weight.quantize(jnp.asarray(draw(shape), jnp.float32)) for shape in ((96, 128), (32, 128)))
    parts, rest = one.concatenate([other]), NF4Weight.quantize(jnp.asarray(draw((5, 100)), jnp.float32))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, one)
    found = decoded_scales({"parts": parts, "rest": rest, "layers": stacked, "norm": jnp.ones(3)})
    for name, weight in (("parts", parts), ("rest", rest)):
        assert found[name].nested_absmax is None and found[name].nested_offset is None
        np.testing.assert_array_equal(found[name].absmax, weight.scales())
    np.testing.assert_array_equal(found["layers"].absmax, jnp.stack([one.scales()] * 2))
    np.testing.assert_array_equal(found["norm"], 1.0)
