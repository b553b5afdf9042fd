"""Compilation for GPUs that are not there: no spills, the right kernel in the right place, no decoded residuals."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import nf4
from pallas_kernels.nf4.shapes import BENCHMARK
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

pytestmark = [pytest.mark.aot, needs_cuda_plugin]

DTYPES = ["bfloat16", "float16", "float32"]


def specs(aot, shape, codes_shape=None):
    out, columns = shape
    return aot.spec((out, columns // 2), jnp.uint8), aot.spec((out, columns // 64), jnp.float32)


def decode(shape, dtype, implementation):
    return lambda c, a: nf4.dequantize(c, a, shape=shape, dtype=dtype, implementation=implementation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [BENCHMARK.shape, (37, 192)], ids=["benchmark", "tile and a bit"])
def test_mosaic_for_hopper(shape, dtype, tmp_path, monkeypatch):
    aot = AOT("h200")
    used = resources.of_mosaic(
        aot, decode(shape, dtype, "mosaic"), *specs(aot, shape), folder=tmp_path, monkeypatch=monkeypatch
    )
    assert used.spill_bytes == used.stack_bytes == 0
    assert used.registers <= 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("card", ["h200", "a100", "rtx4090"])
def test_triton(card, dtype, tmp_path):
    aot = AOT(card)
    used = resources.of_triton(
        aot, decode(BENCHMARK.shape, dtype, "triton"), *specs(aot, BENCHMARK.shape), folder=tmp_path
    )
    if used is not None:
        assert used.spill_bytes == used.stack_bytes == 0
        assert used.registers <= 64


@pytest.mark.parametrize("card, kernel", [("h200", "mosaic_gpu"), ("a100", "triton"), ("rtx4090", "triton")])
def test_the_card_chooses_the_kernel_in_both_passes(card, kernel):
    aot = AOT(card)
    shape = (512, 1024)

    def both(x, codes, absmax):
        y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=shape), x)
        return pullback(y)

    x = aot.spec((256, 1024), jnp.bfloat16)
    text = aot.compile(both, x, *specs(aot, shape), options={"xla_gpu_enable_triton_gemm": False}).as_text()
    calls = [line for line in text.splitlines() if "custom_call_target" in line]
    assert sum(kernel in line for line in calls) == 2
    products = [line for line in calls if "cublas" in line]
    assert len(products) == 2 and all("f32[" not in line.split("custom-call")[0] for line in products)


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_unrolled_layers_keep_no_decoded_weight(implementation):
    """The forward and the backward pass decode the same bytes: the compiler must not merge the two."""
    aot = AOT("h200")
    shape, layers, rows = (4096, 4096), 6, 256

    def loss(x, packed):
        for codes, absmax in packed:
            x = jnp.tanh(nf4.matmul(x, codes, absmax, shape=shape, implementation=implementation))
        return x.astype(jnp.float32).sum()

    packed = [specs(aot, shape)] * layers
    options = {"xla_gpu_enable_triton_gemm": False}
    compiled = aot.compile(jax.grad(loss), aot.spec((rows, 4096), jnp.bfloat16), packed, options=options)
    decoded, activation = 2 * shape[0] * shape[1], 2 * rows * 4096
    # Room for two decoded weights at a time and three activations a layer, not for six decoded weights.
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * decoded + 3 * layers * activation
