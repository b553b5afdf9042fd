"""A format is one class and one row of a table on each side: int8 with a scale a row is read, held, multiplied, merged.

The toy stands for a format that a folder comes in and that is not written.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from convert.adapter_config import AdapterConfig
from convert.adapters import write_adapter
from convert.blocks import row_ranges
from convert.families import family_for
from convert.formats import FORMATS, Format
from convert.inspect import inspect
from convert.merge import merge
from convert.tensor_file import read_range
from convert.verify import compare
from convert.weights import open_weights, stream
from fastjax.models.paths import adapter_paths
from fastjax.quantization import Weight, as_weight, concatenate, dequantize, matmul, rows_of
from fastjax.quantization.weights import WEIGHTS
from tests.support import tiny

SCALE = "_row_scale"


class Int8Tensor(NamedTuple):
    codes: np.ndarray
    scales: np.ndarray
    dtype: str = "float32"


class Int8(Format):
    name, label, target = "int8", "INT8", "int8"
    bits, packed, methods = 8, Int8Tensor, ("toy",)

    def holds(self, stored):
        return stored.info.dtype == "int8" and stored.info.shape == stored.shape

    def claims(self, name):
        return name, name + SCALE

    def decoded_dtype(self, stored):
        return np.dtype(np.float32)

    def read(self, stored):
        return Int8Tensor(stored.checkpoint.read(stored.name), stored.checkpoint.read(stored.name + SCALE))

    def decode(self, tensor):
        return tensor.codes * tensor.scales[:, None]

    def blocks(self, stored):
        scales, columns = stored.checkpoint.read(stored.name + SCALE), stored.shape[1]
        for begin, end in row_ranges(stored.shape):
            codes = read_range(stored.name, stored.info, begin * columns, end * columns).reshape(-1, columns)
            yield codes * scales[begin:end, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight(Weight):
    codes: jax.Array
    scales: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

    formats = ("INT8",)

    def matmul(self, x):
        return jnp.einsum("...i,oi->...o", x, self.dequantize(x.dtype), precision="highest")

    def rows(self, rows):
        return Int8Weight(self.codes[rows], self.scales[rows], (rows.stop - rows.start, self.shape[1]))

    def dequantize(self, dtype):
        return (self.codes.astype(jnp.float32) * self.scales[:, None]).astype(dtype)

    def concatenate(self, others):
        weights = [self, *others]
        rows = sum(weight.shape[0] for weight in weights)
        codes, scales = (jnp.concatenate([getattr(w, name) for w in weights]) for name in ("codes", "scales"))
        return Int8Weight(codes, scales, (rows, self.shape[1]))

    def axes(self, out, into):
        return dataclasses.replace(self, codes=P(out, into), scales=P(None))

    @classmethod
    def from_tensor(cls, tensor):
        return cls(jnp.asarray(tensor.codes), jnp.asarray(tensor.scales), tensor.codes.shape)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A folder with its layers' matrices in int8, and the same numbers in float32."""
    monkeypatch.setitem(FORMATS, "int8", Int8())
    monkeypatch.setitem(WEIGHTS, Int8Tensor, Int8Weight)
    packed, decoded = {}, {}
    for name, array in tiny.arrays(tiny.CONFIG).items():
        packed[name] = decoded[name] = array
        if name.endswith("proj.weight"):
            scales = np.abs(array).max(axis=1) / 127
            codes = np.rint(array / scales[:, None]).astype(np.int8)
            packed |= {name: codes, name + SCALE: scales}
            decoded[name] = codes * scales[:, None]
    config = tiny.CONFIG | {"quantization_config": {"quant_method": "toy"}}
    return (
        tiny.write_folder(tmp_path / "packed", config, packed),
        tiny.write_folder(tmp_path / "decoded", tiny.CONFIG, decoded),
    )


def test_a_folder_is_loaded_and_computed_with(folders):
    models = [tiny.adapted(tiny.model(folder, tiny.CONFIG)) for folder in folders]
    packed, decoded = models
    assert jnp.dtype(jnp.int8) in {leaf.dtype for leaf in jax.tree.leaves(packed.frozen)}
    lines = adapter_paths(packed.graphdef, packed.trainable, packed.frozen, 40)
    assert any("INT8 weights" in line.text for line in lines)
    tokens = np.stack(tiny.documents(tiny.CONFIG, (20, 20)))
    expected = tiny.logits(decoded, tokens)
    # float32: only the order of sums differs
    np.testing.assert_allclose(tiny.logits(packed, tokens), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_products_rows_and_mixtures(folders):
    names = ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")
    tensors = [open_weights(folders[0]).read(name, packed=True) for name in names]
    plain = [tensor.codes * tensor.scales[:, None] for tensor in tensors]
    first, second = (Int8Weight.from_tensor(tensor) for tensor in tensors)
    for joined in (concatenate([first, second]), concatenate([first, jnp.asarray(plain[1])])):
        matrix, size = np.concatenate(plain), plain[0].shape[0]
        assert np.array_equal(dequantize(joined, jnp.float32), matrix)
        assert np.array_equal(dequantize(rows_of(joined, slice(size, len(matrix))), jnp.float32), plain[1])
        assert np.array_equal(
            dequantize(rows_of(joined, slice(size - 1, size + 1)), jnp.float32), matrix[size - 1 : size + 1]
        )
        x, dy = jnp.ones((1, 2, matrix.shape[1])), jnp.ones((1, 2, len(matrix)))
        np.testing.assert_allclose(matmul(x, joined), x @ matrix.T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(as_weight(joined).transposed(dy), dy @ matrix, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_merged_into_it(folders, tmp_path):
    adapter = AdapterConfig(r=2, target_modules=["q_proj", "down_proj"])
    rng, arrays = np.random.default_rng(0), {}
    for spec in family_for(tiny.CONFIG).specs(tiny.CONFIG):
        if spec.path.part in adapter.target_modules and spec.kind == "matrix":
            arrays[spec.path.with_leaf("lora_A")] = rng.standard_normal((2, spec.shape[1])).astype(np.float32)
            arrays[spec.path.with_leaf("lora_B")] = rng.standard_normal((spec.shape[0], 2)).astype(np.float32)
    write_adapter(tmp_path / "adapter", adapter, arrays)
    for folder in folders:
        merge(folder, tmp_path / "adapter", tmp_path / f"merged-{folder.name}")
    found, expected = (dict(stream(tmp_path / f"merged-{folder.name}")) for folder in folders)
    assert all(np.array_equal(found[path], array) for path, array in expected.items())
    assert compare(*folders).largest == 0
    assert inspect(folders[0]).formats["int8"][0] == 7 * tiny.CONFIG["num_hidden_layers"]
