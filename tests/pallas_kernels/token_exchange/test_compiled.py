"""Compiled for H200s that are not there: large parts by the kernel, without spills, small ones by XLA."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.token_exchange import all_tokens, own_sums
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

pytestmark = [
    pytest.mark.aot,
    needs_cuda_plugin,
    pytest.mark.newer_jax("jax 0.10 has collectives"),
]


@functools.cache
def cards(number):
    return AOT("h200", gpus=number)


def island(number, tokens, dtype, travel=None):
    def both(x):
        return own_sums(all_tokens(x, "x", 0), "x", 0, None, travel)

    aot = cards(number)
    local = jax.shard_map(both, mesh=aot.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return local, aot.spec((8, tokens, 4096), dtype, P("x"))


@pytest.mark.parametrize(
    ("number", "dtype", "travel"),
    [(2, jnp.float32, None), (4, jnp.bfloat16, None), (4, jnp.float32, jnp.bfloat16), (8, jnp.float32, jnp.bfloat16)],
)
def test_kernels_do_not_spill(number, dtype, travel, tmp_path, monkeypatch):
    kernels = island(number, 2048, dtype, travel)
    used = resources.of_mosaic(cards(number), *kernels, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0
    assert used.registers <= 128, "four thread blocks of a multiprocessor's registers, of which two are taken"


@pytest.mark.parametrize(("tokens", "kernels", "collectives"), [(2048, 2, 0), (16, 0, 2)])
def test_small_parts_are_left_to_collectives(tokens, kernels, collectives):
    text = cards(4).compile(*island(4, tokens, jnp.bfloat16)).as_text()
    assert len(re.findall(r"custom_call_target=\"mosaic_gpu_v2\"", text)) == kernels
    assert len(re.findall(r" (?:all-gather|all-to-all)(?:-start)?\(", text)) == collectives
