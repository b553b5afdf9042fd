"""FP8 folders: blocks, rows, single scales, against plain arithmetic and torch; faults named."""

import math

import ml_dtypes
import numpy as np
import pytest

from convert.errors import ConvertError
from convert.formats import fp8
from convert.saving import save
from convert.weights import open_weights, stream
from tests.convert.conftest import CONFIG
from tests.support.folders import write_checkpoint

BLOCK = [8, 16]


def scale_of(kind, shape, rng):
    rows, columns = shape
    blocks = (math.ceil(rows / BLOCK[0]), math.ceil(columns / BLOCK[1]))
    size = {"blocks": blocks, "rows": (rows, 1), "one": (), "E8M0": blocks}[kind]
    values = np.asarray(rng.uniform(0.01, 2, size), np.float32)
    return np.asarray(2.0 ** np.round(np.log2(values)), ml_dtypes.float8_e8m0fnu) if kind == "E8M0" else values


def expand(scale, kind, shape):
    values = np.asarray(scale).astype(np.float32)
    if kind in ("rows", "one"):
        return np.broadcast_to(values, shape)
    return np.repeat(np.repeat(values, BLOCK[0], 0), BLOCK[1], 1)[: shape[0], : shape[1]]


@pytest.fixture(params=["blocks", "rows", "one", "E8M0"])
def fp8_folder(request, make_folder):
    """(folder, {tree path: float32 values}) with the layers' matrices in FP8."""
    kind = request.param
    folder, tensors = make_folder()
    rng = np.random.default_rng(3)
    values = {}
    for name, array in list(tensors.items()):
        if name.endswith("proj.weight"):
            codes = array.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            scale = scale_of(kind, codes.shape, rng)
            tensors[name] = codes
            tensors[name + ("_scale" if kind == "rows" else "_scale_inv")] = scale
            if kind == "one":
                tensors[name.replace(".weight", ".input_scale")] = np.float32(2.0).reshape(1)
            values[name.removeprefix("model.")] = codes.astype(np.float32) * expand(scale, kind, codes.shape)
    settings = {"quant_method": "fbgemm_fp8" if kind == "rows" else "fp8", "weight_block_size": BLOCK}
    write_checkpoint(folder, tensors.items(), CONFIG | {"quantization_config": settings, "dtype": "bfloat16"})
    return folder, values


def test_values_are_codes_times_scales(fp8_folder, monkeypatch):
    monkeypatch.setattr("convert.blocks.ELEMENTS", 128)
    folder, values = fp8_folder
    weights = open_weights(folder)
    assert len(values) == 21
    for path, right in values.items():
        assert weights.format(path) == "fp8"
        assert weights.read(path).tobytes() == right.astype(ml_dtypes.bfloat16).tobytes()
        blocks = np.concatenate(list(weights.blocks(path)()))
        assert blocks.tobytes() == right.astype(ml_dtypes.bfloat16).astype(np.float32).tobytes()


def test_saving_what_was_read_is_a_plain_folder(fp8_folder, tmp_path):
    folder, values = fp8_folder
    save(tmp_path / "plain", stream(folder), source=folder)
    plain = open_weights(tmp_path / "plain")
    assert "quantization_config" not in plain.checkpoint.config
    assert {plain.format(path) for path in plain.specs} == {"bfloat16"}
    assert all(plain.read(path).tobytes() == v.astype(ml_dtypes.bfloat16).tobytes() for path, v in values.items())


@pytest.mark.torch
def test_every_code_equals_torchs():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.linspace(0.1, 3, 2, dtype=np.float32).reshape(2, 1)
    for name in fp8.DTYPES:
        scale = fp8.make_scale("s", scales, (16, 16), (8, 16), "f")
        ours = fp8.decode(codes.view(getattr(ml_dtypes, name)), scale)
        theirs = torch.from_numpy(codes).view(getattr(torch, name)).float() * torch.from_numpy(scales.repeat(8, 0))
        np.testing.assert_array_equal(ours, theirs.numpy())  # a NaN may be another NaN
        zeros = ours == 0
        np.testing.assert_array_equal(np.signbit(ours[zeros]), np.signbit(theirs.numpy()[zeros]))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, r"q_proj\.weight is FP8 and needs .*weight_scale_inv, which is missing"),
        (np.ones((3, 3), np.float32), r"weight_scale_inv: expected shape \[3, 2\] \(blocks\), \[20, 1\] or \[1\]"),
        (np.full((3, 2), np.nan, np.float32), r"weight_scale_inv: expected finite scales"),
        (np.ones((3, 2), np.int32), r"weight_scale_inv: expected scales in float32"),
    ],
)
def test_faults_are_named(make_folder, scale, message):
    folder, tensors = make_folder()
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    if scale is not None:
        tensors[name + "_scale_inv"] = scale
    settings = {"quant_method": "fp8", "weight_block_size": BLOCK}
    write_checkpoint(folder, tensors.items(), CONFIG | {"quantization_config": settings})
    with pytest.raises(ConvertError, match=message) as caught:
        open_weights(folder).read("layers.0.self_attn.q_proj.weight")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("size", [3, [0, 1], [1], ["a", 2], [1.5, 2]])
def test_a_block_size_that_is_none(size):
    with pytest.raises(ConvertError, match="config.json: quantization_config.weight_block_size: expected two positive"):
        fp8.block_shape({"quantization_config": {"weight_block_size": size}}, "config.json")
