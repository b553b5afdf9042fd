"""Compiled for two H200s that are not there: no spills, and no copy of a stack."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import nf4, shard_gather
from pallas_kernels.shard_gather import Shared
from tests.pallas_kernels.shard_gather.support import SHARDS
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

pytestmark = [
    pytest.mark.aot,
    needs_cuda_plugin,
    pytest.mark.newer_jax("jax 0.10 gathers"),
]


@functools.cache
def two():
    return AOT("h200", gpus=2)


def island(op, arrays):
    places = (P(), *[P(None, "x")] * arrays)
    return jax.shard_map(op, mesh=two().mesh, in_specs=places, out_specs=P(), check_vma=False)


def specs(*arrays):
    """Specs of stacks of four layers, each an array's shape and dtype."""
    layer = two().spec((), jnp.int32)
    return layer, *(two().spec((4, *shape), dtype, P(None, "x")) for shape, dtype in arrays)


def gathered():
    arrays = [((2 * rows, *rest), dtype) for dtype, (rows, *rest) in SHARDS]
    return island(lambda layer, *own: shard_gather.gather(own, layer, "x"), len(arrays)), specs(*arrays)


def decoded():
    def decode(layer, own):
        absmax = jnp.ones(4096 * 4096 // 64, jnp.float32)
        return nf4.dequantize(Shared(own, layer, "x", 2), absmax, shape=(4096, 4096), dtype=jnp.bfloat16)

    return island(decode, 1), specs(((4096, 2048), "uint8"))


@pytest.mark.parametrize("case", [gathered, decoded])
def test_kernels_do_not_spill(case, tmp_path, monkeypatch):
    function, arguments = case()
    used = resources.of_mosaic(two(), function, *arguments, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0
    assert used.registers <= 96


def test_codes_are_neither_gathered_nor_copied():
    function, arguments = decoded()
    compiled = two().compile(function, *arguments)
    text = compiled.as_text()
    assert "nf4_dequantize_shared" in text and "all-gather" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21  # the scales
