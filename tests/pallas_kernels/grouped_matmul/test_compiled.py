"""Deviceless compilation for Hopper: no spills, by the public functions and their default block sizes."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dw, grouped_matmul_dx
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

pytestmark = [pytest.mark.aot, needs_cuda_plugin]
X, N, K, T, M = 128, 1536, 2048, 8192, 65536


@pytest.mark.exhaustive("gradient in x", "gradient in w")
@pytest.mark.parametrize("case", ["gathered, with a low-rank product", "gradient in x", "thin", "gradient in w"])
def test_kernels_for_hopper(case, tmp_path, monkeypatch):
    aot = AOT("h200")
    of = functools.partial(aot.spec, dtype=jnp.bfloat16)
    sizes, rows = aot.spec((X,), jnp.int32), aot.spec((M,), jnp.int32)
    function, arguments = {
        "gathered, with a low-rank product": (
            lambda x, w, sizes, rows, z, b: grouped_matmul(x, w, sizes, rows=rows, low_rank=(z, b)),
            (of((T, K)), of((X, N, K)), sizes, rows, of((M, 16)), of((X, N, 16))),
        ),
        "gradient in x": (grouped_matmul_dx, (of((M, N)), of((X, N, K)), sizes)),
        "thin": (grouped_matmul, (of((M, K)), of((X, 16, K)), sizes)),
        "gradient in w": (
            lambda dy, x, sizes, rows: grouped_matmul_dw(dy, x, sizes, rows=rows, dtype=jnp.float32),
            (of((M, N)), of((T, K)), sizes, rows),
        ),
    }[case]
    used = resources.of_mosaic(aot, function, *arguments, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0
