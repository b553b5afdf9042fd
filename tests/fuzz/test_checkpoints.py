"""Files of a model folder: safetensors headers and the index of shards, damaged and with values put in."""

import json

import numpy as np
import pytest

from convert.checkpoint import INDEX, open_checkpoint, write_config
from convert.errors import ConvertError
from convert.tensor_file import DTYPES, read_header, read_tensor, write_tensor_file
from tests.support import hostile
from tests.support.fuzz import fuzz

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(5, dtype=np.int8),
    "c": np.float64(3),
    "empty": np.zeros((0, 3), np.float16),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def framed(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file: its header with the length in front, and the tensors' bytes."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file's header and the bytes behind it."""
    file = tmp_path_factory.mktemp("whole") / "model.safetensors"
    write_tensor_file(file, TENSORS)
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def test_headers(tmp_path, whole, pytestconfig):
    file = tmp_path / "model.safetensors"
    header, data = whole

    def make(draw, number):
        kind = number % 4
        if kind == 0:
            return hostile.damaged(draw, framed(header, data), draw.choice(hostile.DAMAGE))
        if kind == 1:
            return framed(hostile.damaged_text(draw, header), data)
        if kind == 2:
            length = draw.choice((0, 1, 7, len(header) - 1, len(header) + 1, 2**31, 2**63, 2**64 - 1, 100_000_001))
            return framed(header, data, length)[: draw.choice((0, 7, 8, 9, 10**6))]
        tree = json.loads(header)
        entry = tree[draw.choice([name for name in tree if name != "__metadata__"])]
        if draw.random() < 0.3:
            entry["dtype"] = draw.choice(list(DTYPES))
        if draw.random() < 0.3:
            entry["shape"] = draw.choices((0, 1, 2, 3, 2**31, 2**62, 2**63, -1, True, 1.0), k=draw.randint(0, 40))
        return framed(json.dumps(hostile.changed(draw, tree)).encode(), data)

    def read(raw):
        file.write_bytes(raw)
        for name, info in read_header(file).items():
            assert read_tensor(name, info).nbytes == info.nbytes <= len(raw)

    fuzz("safetensors header", pytestconfig.getoption("--fuzz"), make, read, (ConvertError,), [framed(*whole)])


def test_index_files(tmp_path, pytestconfig):
    weight_map = {}
    for shard, names in zip(SHARDS, (["a.weight", "c"], ["b.weight", "empty"]), strict=True):
        write_tensor_file(tmp_path / shard, {name: TENSORS[name] for name in names})
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": 61}, "weight_map": weight_map}
    config = {"model_type": "llama", "num_hidden_layers": 2, "text_config": {"num_hidden_layers": 2}}
    write_config(tmp_path / "config.json", config)

    def make(draw, number):
        if number % 3 == 0:
            return INDEX, hostile.damaged_text(draw, json.dumps(index).encode())
        if number % 3 == 1:
            tree = hostile.changed(draw, index)
            if draw.random() < 0.3 and isinstance(tree, dict):
                tree["weight_map"] = weight_map | {hostile.text(draw): draw.choice((*SHARDS, hostile.value(draw)))}
            return INDEX, json.dumps(tree).encode()
        tree = json.dumps(hostile.changed(draw, config)).encode()
        return "config.json", tree if draw.random() < 0.5 else hostile.damaged_text(draw, tree)

    right = {name: (tmp_path / name).read_bytes() for name in ("config.json",)} | {INDEX: json.dumps(index).encode()}

    def read(given):
        name, raw = given
        for other, contents in right.items():
            (tmp_path / other).write_bytes(raw if other == name else contents)
        checkpoint = open_checkpoint(tmp_path)
        for tensor in checkpoint.names:
            checkpoint.read(tensor)

    fuzz("index and config.json", pytestconfig.getoption("--fuzz"), make, read, (ConvertError,), right.items())
