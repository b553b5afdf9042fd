"""safetensors files: equal to the library's, and damaged ones refused by name."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy

from convert import tensor_file
from convert.errors import ConvertError
from convert.tensor_file import DTYPES, read_header, read_tensor, write_tensor_file


def arrays():
    rng = np.random.default_rng(0)
    made = {f"t.{name}": rng.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in DTYPES.items()}
    return made | {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.float16), "ä": np.arange(3)}


def test_every_dtype_comes_back(tmp_path):
    file = tmp_path / "a.safetensors"
    tensors = arrays()
    tensors["strided"] = np.arange(24, dtype=np.float32).reshape(4, 6).T
    write_tensor_file(file, tensors)
    header = read_header(file)
    assert set(header) == set(tensors)
    for name, array in tensors.items():
        back = read_tensor(name, header[name])
        assert back.dtype == array.dtype and back.shape == array.shape == header[name].shape
        assert header[name].dtype == array.dtype.name
        assert back.tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "made": "here"}])
def test_files_equal_the_librarys(tmp_path, metadata):
    plain = {name: array for name, array in arrays().items() if not str(array.dtype).startswith("float8")}
    write_tensor_file(tmp_path / "ours.safetensors", plain, metadata)
    safetensors.numpy.save_file(plain, tmp_path / "theirs.safetensors", metadata=metadata or {"format": "pt"})
    ours, theirs = ((tmp_path / f"{who}.safetensors").read_bytes() for who in ("ours", "theirs"))
    if metadata is None:
        assert ours == theirs
    else:  # the library writes more than one metadata key in an order of its own
        assert len(ours) == len(theirs)
    loaded = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    assert all(np.array_equal(loaded[name], array) for name, array in plain.items())


def test_a_dtype_without_a_name_is_refused(tmp_path):
    with pytest.raises(ConvertError, match="w: expected a dtype of .*float32.*got 'complex64'"):
        write_tensor_file(tmp_path / "a.safetensors", {"w": np.zeros(2, np.complex64)})


def put(file, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": ENTRY | {"dtype": "Q4"}}, r"w\.dtype: expected one of BOOL.*got 'Q4'"),
        ({"w": ENTRY | {"shape": [3]}}, r"w\.data_offsets: expected 12 bytes for F32 \[3\], got \[0, 8\]"),
        ({"w": ENTRY | {"shape": [-2]}}, r"w\.shape: expected a list of sizes"),
        ({"w": ENTRY | {"shape": [True, 2]}}, r"w\.shape: expected a list of sizes"),
        ({"w": ENTRY | {"shape": [2**63]}}, r"w\.shape: expected a list of sizes"),
        ({"w": ENTRY | {"data_offsets": [8, 0]}}, r"w\.data_offsets: expected \[begin, end\]"),
        ({"w": ENTRY | {"data_offsets": [0, 8, 9]}}, r"w\.data_offsets: expected \[begin, end\]"),
        ({"w": ENTRY | {"data_offsets": [4, 12]}}, r"w\.data_offsets: expected offset \d+, where the tensor before"),
        ({"w": ENTRY, "v": ENTRY}, r"data_offsets: expected offset"),
        ({"w": 3}, "w: expected an object with dtype, shape and data_offsets, got 3"),
        ({"__metadata__": {"a": 1}, "w": ENTRY}, "__metadata__: expected an object of strings"),
        (b'{"w":1,"w":2}', "header: expected a JSON object: the same key twice: w"),
        (b"\xff\xfe", "header: expected a JSON object"),
        (b"[]", "header: expected a JSON object, got"),
        ({}, "size: expected 10 bytes from the header.*got '18 bytes'"),
    ],
)
def test_a_header_that_contradicts_itself(tmp_path, header, message):
    file = tmp_path / "bad.safetensors"
    put(file, header, bytes(8))
    with pytest.raises(ConvertError, match=message) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_truncated_files_name_what_is_short(tmp_path):
    file = tmp_path / "cut.safetensors"
    put(file, {"w": ENTRY}, bytes(8))
    whole = file.read_bytes()
    header = read_header(file)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(ConvertError, match="is the file whole") as caught:
            read_header(file)
        assert str(file) in str(caught.value)
    with pytest.raises(ConvertError, match="w: expected 8 bytes at offset .*, got '7 bytes'"):
        read_tensor("w", header["w"])


@pytest.mark.parametrize("columns", [24, 25])
def test_large_tensors_are_read_in_parts(tmp_path, monkeypatch, columns):
    file, values = tmp_path / "a.safetensors", np.arange(4 * columns, dtype=np.float32).reshape(4, columns)
    write_tensor_file(file, {"w": values})
    whole, info, places, fill = file.read_bytes(), read_header(file)["w"], [], tensor_file._fill
    monkeypatch.setattr(tensor_file, "_LARGE", 160)
    monkeypatch.setattr(tensor_file, "_PART", 64)
    monkeypatch.setattr(tensor_file, "_fill", lambda file, start, raw: places.append(start) or fill(file, start, raw))
    assert np.array_equal(read_tensor("w", info), values)
    assert sorted(places) == list(range(info.start, info.start + values.nbytes, 64))
    for got in (0, 63, 64, 65, values.nbytes - 1):
        file.write_bytes(whole[: info.start + got])
        with pytest.raises(ConvertError, match=f"w: expected {values.nbytes} bytes at offset .*, got '{got} bytes'"):
            read_tensor("w", info)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(ConvertError, match="no such file"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(ConvertError, match="expected a safetensors file, got 'a folder'"):
        read_header(tmp_path)
