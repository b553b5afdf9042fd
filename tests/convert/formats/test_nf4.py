"""NF4: the maths by itself, the file form, and bit-equality with bitsandbytes' CPU code."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.errors import ConvertError
from convert.formats import nf4
from convert.formats.dynamic import _nearest_on_grid, dynamic_map, encode_dynamic

SHAPES = [(1, 1), (3, 7), (1, 63), (8, 8), (5, 13), (7, 64), (9, 65), (33, 31), (64, 192), (130, 257)]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def weight(shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    # A different magnitude for each element's column, so that scales differ from block to block.
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1]))).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nested", [False, True])
def test_encode_picks_the_nearest_value_and_is_idempotent(shape, nested):
    original = weight(shape)
    tensor = nf4.encode(original, nested=nested)
    assert tensor.codes.shape == (math.ceil(original.size / 2),) and tensor.codes.dtype == np.uint8
    assert tensor.absmax.shape == (math.ceil(original.size / 64),)
    assert tensor.absmax.dtype == (np.uint8 if nested else np.float32)
    decoded = nf4.decode(tensor, np.float64)
    assert decoded.shape == shape
    scales = np.repeat(nf4.decode_absmax(nf4.encode(original)), 64)[: original.size].reshape(shape)
    nearest = np.abs(original[..., None] / scales[..., None] - nf4.NF4_MAP).min(-1)
    if nested:
        plain = nf4.encode(original).absmax
        assert tensor.nested_offset == pytest.approx(plain.mean(), rel=1e-6)  # float32, in another order
        gap = np.diff(dynamic_map()).max() / 2 * tensor.nested_absmax.max()
        assert np.abs(nf4.decode_absmax(tensor) - plain).max() <= gap * 1.001 + 1e-6
    else:
        assert np.allclose(np.abs(decoded - original) / scales, nearest, atol=1e-6)  # float32 rounding of x / absmax
        again = nf4.encode(nf4.decode(tensor))
        assert np.array_equal(again.codes, tensor.codes) and np.array_equal(again.absmax, tensor.absmax)


def test_the_even_element_is_the_high_nibble_and_padding_means_zero():
    tensor = nf4.encode(np.array([-1.0, 1.0, 0.0], np.float32))
    assert tensor.codes.tolist() == [0x0F, 0x77]


def test_zeros_decode_to_zeros():
    for shape in [(4, 64), (3, 5), (2, 33)]:
        for nested in (False, True):
            tensor = nf4.encode(np.zeros(shape, np.float32), nested=nested)
            assert not nf4.decode(tensor).any()
    mixed = np.zeros((2, 64), np.float32)
    mixed[1] = 3
    assert np.array_equal(nf4.decode(nf4.encode(mixed)), mixed)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused(value):
    bad = np.ones((3, 70), np.float32)
    bad[2, 69] = value
    with pytest.raises(ConvertError, match="expected finite values"):
        nf4.encode(bad)


def test_another_dtype_is_refused():
    with pytest.raises(ConvertError, match="expected a dtype of float32, float16, bfloat16, got int8"):
        nf4.encode(np.ones((3, 4), np.int8))


def test_long_tensors_are_cut_into_chunks_without_a_seam(monkeypatch):
    original = weight((37, 129))
    whole = nf4.encode(original, nested=True)
    monkeypatch.setattr(nf4, "_CHUNK", 3)
    pieces = nf4.encode(original, nested=True)
    assert np.array_equal(whole.codes, pieces.codes) and np.array_equal(whole.absmax, pieces.absmax)
    assert np.array_equal(nf4.decode(whole), nf4.decode(pieces))


def test_the_dynamic_map():
    values = dynamic_map()
    assert values.shape == (256,) and values.dtype == np.float32
    assert np.all(np.diff(values) > 0) and values[-1] == 1.0 and values[127] == 0.0
    assert np.array_equal(values[:127], -values[128:255][::-1])  # all but the 1 at the end have a negative
    codes, absmax = encode_dynamic(np.array([0.5, -1.0, 0.0] + [0.0] * 400, np.float32))
    assert absmax.tolist() == [1.0, 0.0]
    assert codes[256:].max() == 0 and abs(values[codes[2]]) < 2 / 65535 and abs(values[codes[0]] - 0.5) < 0.004


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 150),
    nested=st.booleans(),
    dtype=st.sampled_from(sorted(DTYPES)),
    storage=st.sampled_from(["uint8", "bfloat16", "float32", "int8"]),
)
def test_file_form_and_back(rows, columns, nested, dtype, storage):
    tensor = nf4.encode(weight((rows, columns), DTYPES[dtype]), nested=nested, storage_dtype=storage)
    if tensor.codes.size % np.dtype(storage).itemsize:
        with pytest.raises(
            ConvertError, match=f"x.weight: expected a multiple of .* bytes for quant_storage {storage}"
        ):
            nf4.to_tensors("x.weight", tensor)
        return
    tensors = nf4.to_tensors("x.weight", tensor)
    assert tensors["x.weight"].shape == (tensor.codes.size // np.dtype(storage).itemsize, 1)
    back = nf4.from_tensors("x.weight", tensors, "file")
    assert np.array_equal(nf4.decode(back), nf4.decode(tensor))
    again = nf4.to_tensors("x.weight", back)
    assert list(again) == list(tensors)
    for name, array in tensors.items():
        assert again[name].dtype == array.dtype and again[name].shape == array.shape
        assert again[name].tobytes() == array.tobytes()


def test_bytes_of_a_state_that_was_written_differently_are_kept():
    tensors = nf4.to_tensors("w", nf4.encode(weight((4, 70)), nested=True))
    state = json.loads(tensors["w" + nf4.QUANT_STATE].tobytes())
    raw = json.dumps(state, indent=1, sort_keys=True).encode()
    tensors["w" + nf4.QUANT_STATE] = np.frombuffer(raw, np.uint8)
    tensors["w"] = tensors["w"].reshape(1, -1)
    back = nf4.to_tensors("w", nf4.from_tensors("w", tensors, "file"))
    assert back["w" + nf4.QUANT_STATE].tobytes() == raw and back["w"].shape == (1, 140)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".absmax", lambda a: a[:-1], r"w\.absmax: expected 5 elements \(one a block\), got '4'"),
        (".absmax", lambda a: a.astype(np.float32), r"w\.absmax: expected dtype uint8, got 'float32'"),
        (".quant_map", lambda a: a[:8], r"w\.quant_map: expected 16 elements"),
        (".nested_absmax", lambda a: np.append(a, a), r"w\.nested_absmax: expected 1 elements"),
        (".nested_quant_map", lambda a: a.astype(np.float16), r"w\.nested_quant_map: expected dtype float32"),
        ("", lambda a: a[:-1], r"w: expected 140 elements \(codes for \[4, 70\] in bytes\), got '139'"),
        (".quant_map", lambda a: None, r"w is NF4 and needs w\.quant_map, which is missing"),
        (nf4.QUANT_STATE, lambda a: a[:-1], r"bitsandbytes__nf4: expected a JSON object"),
    ],
)
def test_parts_that_do_not_fit_are_named(suffix, change, message):
    tensors = nf4.to_tensors("w", nf4.encode(weight((4, 70)), nested=True))
    changed = change(tensors.pop("w" + suffix))
    if changed is not None:
        tensors["w" + suffix] = changed
    with pytest.raises(ConvertError, match="some/file: .*" + message if "needs" in message else message):
        nf4.from_tensors("w", tensors, "some/file")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_type", "fp4"),
        ("blocksize", 0),
        ("blocksize", 63),
        ("blocksize", 2**31),
        ("dtype", "int8"),
        ("shape", [4, -1]),
        ("shape", [4, 2**31]),
        ("shape", 280),
        ("nested_blocksize", "256"),
        ("nested_dtype", "float16"),
        ("nested_offset", None),
        ("nested_offset", float("nan")),
        ("nested_offset", 10**299),
    ],
)
def test_a_state_with_a_wrong_field_is_named(key, value):
    tensors = nf4.to_tensors("w", nf4.encode(weight((4, 70)), nested=True))
    state = json.loads(tensors["w" + nf4.QUANT_STATE].tobytes()) | {key: value}
    tensors["w" + nf4.QUANT_STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    with pytest.raises(ConvertError, match=rf"some/file: w\.quant_state\.bitsandbytes__nf4\.{key}: expected"):
        nf4.from_tensors("w", tensors, "some/file")
    del state[key]
    state["surprise"] = 1
    tensors["w" + nf4.QUANT_STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    with pytest.raises(ConvertError, match="expected the keys .*surprise"):
        nf4.from_tensors("w", tensors, "some/file")


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=80), value=st.none() | st.integers() | st.floats() | st.text() | st.lists(st.integers()))
def test_no_state_crashes_the_reader(raw, value):
    tensors = nf4.to_tensors("w", nf4.encode(weight((4, 70)), nested=True))
    state = json.loads(tensors["w" + nf4.QUANT_STATE].tobytes())
    broken = [raw] + [json.dumps(state | {key: value}).encode() for key in state]
    for state_bytes in broken:
        tensors["w" + nf4.QUANT_STATE] = np.frombuffer(state_bytes, np.uint8)
        try:
            nf4.from_tensors("w", tensors, "some/file")
        except ConvertError as error:
            assert "some/file" in str(error)


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


def as_torch(array):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array.astype(np.float32)).to(getattr(torch, array.dtype.name))


@pytest.fixture(scope="module")
def bnb():
    """bitsandbytes.functional, without its attempts to compile (seconds for every shape)."""
    pytest.importorskip("torch")
    dynamo = pytest.importorskip("torch._dynamo.config")
    before, dynamo.disable = dynamo.disable, True
    yield pytest.importorskip("bitsandbytes.functional")
    dynamo.disable = before


def decoded_by(bnb, codes, state, shape):
    """bitsandbytes' decoding, float32 [*shape].

    As one row: its AVX-512 kernel gives wrong scales to blocks that cross rows when the rows are a multiple of 16 and
    none of 64 elements long (its generic code, and this, do not).
    """
    state.shape = (1, math.prod(shape))
    return bnb.dequantize_4bit(codes, state).float().numpy().reshape(shape)


@pytest.mark.torch
def test_the_maps_equal_bitsandbytes(bnb):
    assert np.array_equal(bnb.create_dynamic_map().numpy(), dynamic_map())
    assert np.array_equal(bnb.get_4bit_type("nf4", device="cpu").numpy(), nf4.NF4_MAP)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_scales_and_decoding_equal_bitsandbytes(bnb, shape, dtype):
    original = weight(shape, DTYPES[dtype], seed=sum(shape))
    original.reshape(-1)[64:128] = 0  # a block of zeros, short or whole
    codes, state = bnb.quantize_4bit(as_torch(original), quant_type="nf4", compress_statistics=False)
    tensor = nf4.encode(original)
    assert np.array_equal(tensor.codes, codes.numpy().reshape(-1))
    assert tensor.absmax.tobytes() == state.absmax.numpy().tobytes()
    for target in DTYPES:
        state.dtype = as_torch(original[:1].astype(DTYPES[target])).dtype
        decoded = decoded_by(bnb, codes, state, shape)
        assert np.array_equal(decoded, nf4.decode(tensor, DTYPES[target]).astype(np.float32))


def around(points, scale):
    """float32 values that, divided by `scale`, lie on the points and a few units in the last place beside them."""
    values = [np.float32(point * scale) for point in points]
    for direction in (-np.inf, np.inf):
        nearby = values
        for _ in range(2):
            nearby = np.nextafter(nearby[: len(points)], np.float32(direction))
            values = np.concatenate([values, nearby])
    return np.asarray(values, np.float32)


@pytest.mark.torch
@pytest.mark.parametrize("short", [False, True])
def test_values_on_the_border_between_two_codes_equal_bitsandbytes(bnb, short):
    rng = np.random.default_rng(7)
    bounds = (nf4.NF4_MAP[:-1] + nf4.NF4_MAP[1:]) / np.float32(2)
    for scale in [np.float32(1), *np.exp(rng.standard_normal(60)).astype(np.float32)]:
        borders = around(bounds, scale)
        for part in np.array_split(borders, 2):  # 38 values and the scale fit into one block
            rest = np.zeros(0 if short else 63 - part.size, np.float32)
            block = np.concatenate([[scale], part, rest]).astype(np.float32)
            codes, state = bnb.quantize_4bit(as_torch(block), quant_type="nf4", compress_statistics=False)
            ours = nf4.encode(block)
            assert np.array_equal(ours.codes, codes.numpy().reshape(-1))
            assert np.array_equal(ours.absmax, state.absmax.numpy())


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(3, 7), (64, 64), (129, 200), (256, 1031)])
@pytest.mark.parametrize("zeros", [False, True])
def test_nested_scales_equal_bitsandbytes_given_its_offset(bnb, shape, zeros):
    original = np.zeros(shape, np.float32) if zeros else weight(shape)
    codes, state = bnb.quantize_4bit(as_torch(original), quant_type="nf4", compress_statistics=True)
    offset = state.offset.item()
    tensor = nf4.encode(original, nested=True, offset=offset)
    assert np.array_equal(tensor.codes, codes.numpy().reshape(-1))
    assert np.array_equal(tensor.absmax, state.absmax.numpy())
    assert tensor.nested_absmax.tobytes() == state.state2.absmax.numpy().tobytes()
    assert tensor.nested_quant_map.tobytes() == state.state2.code.numpy().tobytes()
    assert np.array_equal(decoded_by(bnb, codes, state, shape), nf4.decode(tensor))
    # The mean itself depends on torch's order of summation in its last two bits.
    ours = nf4.encode(original, nested=True).nested_offset
    assert abs(ours - offset) <= 2 * np.spacing(np.float32(offset))


@pytest.mark.torch
def test_the_8_bit_encoder_equals_bitsandbytes(bnb):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.standard_normal(200_003), np.linspace(-1e-3, 1e-3, 512), np.zeros(300)])
    values = values.astype(np.float32)
    codes, state = bnb.quantize_blockwise(torch.from_numpy(values.copy()), blocksize=256)
    ours, absmax = encode_dynamic(values)
    assert np.array_equal(ours, codes.numpy()) and np.array_equal(absmax, state.absmax.numpy())

    # Where one grid point ends and the next, with another code, begins.
    steps = np.flatnonzero(np.diff(_nearest_on_grid()))
    for scale in np.exp(rng.standard_normal(40)).astype(np.float32):
        borders = around((steps + 0.5) / 65535 * 2 - 1, scale)
        padded = np.zeros(math.ceil(borders.size / 255) * 255, np.float32)
        padded[: borders.size] = borders
        values = np.insert(padded.reshape(-1, 255), 0, scale, axis=1).reshape(-1)
        codes, _ = bnb.quantize_blockwise(torch.from_numpy(values.copy()), blocksize=256)
        assert np.array_equal(encode_dynamic(values)[0], codes.numpy())
