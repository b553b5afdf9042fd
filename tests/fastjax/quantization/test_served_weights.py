"""Packed matrices of every format: decoded as the file format decodes them, joined, cut, multiplied, loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.checkpoint import open_checkpoint
from convert.formats import Stored, format_of
from convert.quantize import quantize
from convert.saving import save
from convert.weights import stream
from fastjax.language_model.loading import zeros_of
from fastjax.quantization import MixedWeight, concatenate, dequantize, matmul, rows_of
from fastjax.quantization.weights import from_tensor
from tests.support import tiny

SCHEMES = ("int4-32", "int4-32-zeros", "int8", "nvfp4", "mxfp4", "nf4", "fp8-row", "fp8-block")
CONFIG = tiny.config(hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("plain"), CONFIG, tiny.arrays(CONFIG))


def read(folder, scheme, own):
    """Matrices of a folder, packed and decoded."""
    checkpoint = open_checkpoint(folder)
    found = []
    for part, rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
        stored = Stored(checkpoint, f"model.layers.0.self_attn.{part}.weight", (rows, 64))
        form = format_of(stored)
        assert form is not None and form.label.lower() == scheme.partition("-")[0]
        tensor = form.read(stored)
        tensor = tensor._replace(dtype=own) if isinstance(tensor, tuple) else dataclasses.replace(tensor, dtype=own)
        found.append((tensor, form.decode(tensor)))
    return found


@jax.jit
def decoded(weight):
    """A matrix in two dtypes, and rows of it."""
    return (
        dequantize(weight, jnp.float32),
        dequantize(weight, jnp.bfloat16),
        dequantize(rows_of(weight, slice(60, 100)), jnp.float32),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_are_decoded_joined_cut_and_multiplied(plain, tmp_path, scheme):
    quantize(plain, tmp_path / "packed", scheme=scheme)
    by_dtype = []
    for own in ("float32", "float16", "bfloat16"):
        parts = read(tmp_path / "packed", scheme, own)
        joined = concatenate([from_tensor(tensor) for tensor, _ in parts])
        assert not isinstance(joined, MixedWeight) and joined.shape == (128, 64) and joined.dtype == own
        by_dtype.append(joined)
        right = np.concatenate([values for _, values in parts])
        assert right.dtype == np.dtype(own) and np.abs(right.astype(np.float32)).max() > 0.1
        for found, expected in zip(decoded(joined), (right, right, right[60:100]), strict=True):
            assert np.array_equal(np.asarray(found), expected.astype(found.dtype))
    assert isinstance(concatenate(by_dtype), MixedWeight)
    right = right.astype(np.float32)
    # float32 products of rounded values: only the order of sums differs
    x, dy = (jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, n)), jnp.float32) for n in (64, 128))
    out, pull = jax.vjp(lambda x: matmul(x, joined), x)
    np.testing.assert_allclose(out, x @ right.T, rtol=0, atol=1e-5)
    np.testing.assert_allclose(pull(dy)[0], dy @ right, rtol=0, atol=1e-5)
    assert not any(getattr(leaf, "shape", None) == right.shape and leaf.dtype.kind == "f" and leaf.dtype.itemsize > 1
                   for leaf in jax.tree.leaves(pull))  # fmt: skip


def described(leaf):
    return leaf.shape, str(leaf.dtype)


@pytest.mark.exhaustive("int4-32-zeros-None")
@pytest.mark.parametrize(
    ("scheme", "activations"), [("int4-32-zeros", None), ("nvfp4", None), ("int4-32", "int8"), ("int8", "none")]
)
def test_a_folder_is_a_base(plain, tmp_path, scheme, activations):
    """Its matrices stay packed, its logits are those of the decoded folder; layers stack; a plan has its shapes."""
    quantize(plain, tmp_path / "packed", scheme=scheme, activations=activations, skip=["layers.1.mlp.down_proj"])
    save(tmp_path / "decoded", stream(tmp_path / "packed", packed=False), source=plain)
    options = {"dtype": "float32", "load_in_4bit": scheme != "int8"}
    model = tiny.model(tmp_path / "packed", CONFIG, **options)
    codes = jnp.dtype(jnp.int8 if scheme == "int8" else jnp.uint8)
    assert codes in {leaf.dtype for leaf in jax.tree.leaves(model.frozen)}
    zeros = zeros_of(*tiny.opened(tmp_path / "packed", **options))
    assert jax.tree.map(described, zeros.frozen) == jax.tree.map(described, model.frozen)
    tokens = np.stack(tiny.documents(CONFIG, (20, 20)))
    expected = tiny.logits(tiny.model(tmp_path / "decoded", CONFIG), tokens)
    # float32 both: the order of sums
    np.testing.assert_allclose(tiny.logits(model, tokens), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
