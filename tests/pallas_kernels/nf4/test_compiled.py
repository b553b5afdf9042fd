"""Deviceless compilation: no spills, the right kernel in the right place, no decoded residuals."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import nf4
from pallas_kernels.compat import JAX_VERSION
from pallas_kernels.nf4 import config, mosaic_sm90
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.matrices import BENCHMARK

pytestmark = [pytest.mark.aot, needs_cuda_plugin]

DTYPES = ["bfloat16", "float16", "float32"]


def specs(aot, shape, codes_shape=None):
    out, columns = shape
    return aot.spec((out, columns // 2), jnp.uint8), aot.spec((out, columns // 64), jnp.float32)


def decode(shape, dtype, implementation):
    return lambda c, a: nf4.dequantize(c, a, shape=shape, dtype=dtype, implementation=implementation)


@pytest.mark.exhaustive("benchmark-bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [BENCHMARK.shape, (37, 192)], ids=["benchmark", "tile and a bit"])
def test_mosaic_for_hopper(shape, dtype, tmp_path, monkeypatch):
    aot = AOT("h200")
    used = resources.of_mosaic(
        aot, decode(shape, dtype, "mosaic"), *specs(aot, shape), folder=tmp_path, monkeypatch=monkeypatch
    )
    assert used.spill_bytes == used.stack_bytes == 0
    assert used.registers <= 48


def multiply(gradient, rows, shape, dtype, aot):
    """A product that decodes as it multiplies, and its arguments."""

    def forward(x, codes, absmax):
        return nf4.matmul(x, codes, absmax, shape=shape, implementation="fused")

    def backward(dy, codes, absmax):
        x = jnp.zeros((rows, shape[1]), dtype)
        return jax.vjp(lambda x: forward(x, codes, absmax), x)[1](dy)

    x = aot.spec((rows, shape[0 if gradient else 1]), dtype)
    return backward if gradient else forward, (x, *specs(aot, shape))


@pytest.mark.exhaustive(
    "False-16-shape0-bfloat16-255",
    "False-64-shape2-float16-168",
    "True-512-shape7-bfloat16-168",
)
@pytest.mark.parametrize(
    "gradient, rows, shape, dtype, registers",
    [
        (False, 16, (14336, 4096), "bfloat16", 255),
        (False, 32, (6144, 4096), "float16", 255),
        (False, 64, BENCHMARK.shape, "float16", 168),
        (True, 16, BENCHMARK.shape, "bfloat16", 168),
        (False, 100, (14336, 4096), "bfloat16", 168),
        (True, 128, (14336, 4096), "float16", 168),
        (False, 512, BENCHMARK.shape, "bfloat16", 168),
        (True, 512, BENCHMARK.shape, "bfloat16", 168),
        (False, 1, BENCHMARK.shape, "bfloat16", 255),
    ],
)
def test_products_for_hopper(gradient, rows, shape, dtype, registers, tmp_path, monkeypatch):
    """No spills, no products that ptxas runs one after the other; the warpgroups of the larger kernel share registers
    out among themselves, so that their initial share says little."""
    aot = AOT("h200")
    function, arguments = multiply(gradient, rows, shape, dtype, aot)
    used = resources.of_mosaic(aot, function, *arguments, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0
    assert used.registers <= registers


@pytest.mark.exhaustive(by="test_products_for_hopper")
@pytest.mark.parametrize(
    "gradient, rows, shape, dtype, sizes",
    [
        (False, 1000, (704, 1536), "float16", config.MatmulRsConfig(cluster=1, splits=1)),
        (False, 100, (14336, 4096), "bfloat16", config.MatmulRsConfig(rows=128)),
        (True, 512, BENCHMARK.shape, "float16", config.MatmulRsConfig(cluster=2)),
        (True, 100, (768, 1536), "float16", config.MatmulRsConfig(rows=128, cluster=1)),
    ],
)
def test_matmul_rs_for_hopper(gradient, rows, shape, dtype, sizes, tmp_path, monkeypatch):
    """No spills: 128 sums and two operands leave room for decoding; and no products one after the other."""
    aot = AOT("h200")
    arguments = aot.spec((rows, shape[0 if gradient else 1]), dtype), *specs(aot, shape)
    function = functools.partial(mosaic_sm90.matmul_rs, gradient=gradient, config=sizes, cores=132)
    used = resources.of_mosaic(aot, function, *arguments, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0


@pytest.mark.exhaustive("matmul_rs")
@pytest.mark.parametrize(
    "rows, shape, dtype, registers",
    [
        (None, BENCHMARK.shape, "bfloat16", 48),
        (16, (14336, 4096), "float16", 255),
        (512, BENCHMARK.shape, "bfloat16", 168),
        (512, BENCHMARK.shape, "float16", 168),
    ],
    ids=["decode", "matvec", "matmul_rs", "matmul_rs, float16"],
)
def test_rounding_twice_takes_the_same_kernels(rows, shape, dtype, registers, tmp_path, monkeypatch):
    """Computation in one dtype of 16 bits over a weight in the other: no other kernel, no spills."""
    aot = AOT("h200")
    named = {"bfloat16": "float16", "float16": "bfloat16"}[dtype]
    if rows is None:
        options = {"shape": shape, "dtype": dtype, "weight_dtype": named, "implementation": "mosaic"}
        function, arguments = functools.partial(nf4.dequantize, **options), specs(aot, shape)
    else:
        options = {"shape": shape, "weight_dtype": named, "implementation": "fused"}
        function, arguments = (
            functools.partial(nf4.matmul, **options),
            (aot.spec((rows, shape[1]), dtype), *specs(aot, shape)),
        )
    used = resources.of_mosaic(aot, function, *arguments, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0
    assert used.registers <= registers


def test_tritons_last_tile_stays_inside(tmp_path):
    """Where blocks are no multiple of a tile's: nothing else keeps a kernel of Pallas-Triton from writing further."""
    aot, shape = AOT("4090"), (396, 832)  # 5,148 blocks, 28 more than whole tiles of 64
    resources.of_triton(aot, decode(shape, "bfloat16", "triton"), *specs(aot, shape), folder=tmp_path)
    [text] = [text for file in tmp_path.glob("*.ptx") if ".entry" in (text := file.read_text())]
    assert re.search(r"min\.s32\s+%r\d+, %r\d+, 5084;", text), "the first block of the last tile is not bounded"


@pytest.mark.exhaustive("a100-80-float32")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("card", ["h200", "a100-80", "4090"])
def test_triton(card, dtype, tmp_path):
    aot = AOT(card)
    used = resources.of_triton(
        aot, decode(BENCHMARK.shape, dtype, "triton"), *specs(aot, BENCHMARK.shape), folder=tmp_path
    )
    if used is not None:
        assert used.spill_bytes == used.stack_bytes == 0
        assert used.registers <= 48


@pytest.mark.exhaustive("h200-mosaic_gpu", "a100-80-triton")
@pytest.mark.parametrize("card, kernel", [("h200", "mosaic_gpu"), ("a100-80", "triton"), ("4090", "triton")])
def test_the_card_chooses_the_kernel_in_both_passes(card, kernel):
    aot = AOT(card)
    shape = (512, 1024)

    def both(x, codes, absmax):
        y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=shape), x)
        return pullback(y)

    x = aot.spec((config.most_rows(gradient=False) + 1, 1024), jnp.bfloat16)
    text = aot.compile(both, x, *specs(aot, shape), options={"xla_gpu_enable_triton_gemm": False}).as_text()
    calls = [line for line in text.splitlines() if "custom_call_target" in line]
    assert sum(kernel in line for line in calls) == 2
    products = [line for line in calls if "cublas" in line]
    assert len(products) == 2 and all("f32[" not in line.split("custom-call")[0] for line in products)


def loss_of(shape, implementation):
    def layer(x, packed):
        return jnp.tanh(nf4.matmul(x, *packed, shape=shape, implementation=implementation))

    def unrolled(x, layers):
        for packed in layers:
            x = layer(x, packed)
        return x.astype(jnp.float32).sum()

    def scanned(x, stacked):
        return jax.lax.scan(lambda x, packed: (layer(x, packed), None), x, stacked)[0].astype(jnp.float32).sum()

    return unrolled, scanned


@pytest.mark.exhaustive("mosaic")
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "xla"])
def test_unrolled_layers_keep_no_decoded_weight(implementation):
    """Neither may the two passes' decodes be merged, nor those of all layers be done at once."""
    aot = AOT("h200")
    shape, layers, rows = (4096, 4096), 6, 256
    unrolled, _ = loss_of(shape, implementation)
    x, options = aot.spec((rows, 4096), jnp.bfloat16), {"xla_gpu_enable_triton_gemm": False}
    compiled = aot.compile(jax.grad(unrolled), x, [specs(aot, shape)] * layers, options=options)
    decoded, activation = 2 * shape[0] * shape[1], 2 * rows * 4096
    # Room for one decoded weight, its neighbour in transition and two activations a layer, not for six decoded weights.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * decoded + 2 * layers * activation


@pytest.mark.exhaustive("mosaic")
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_scanned_layers_are_decoded_where_they_lie(implementation):
    """A layer's codes are a slice of the stacked ones: no kernel may copy it first, forward or backward."""
    if implementation == "mosaic" and JAX_VERSION < (0, 11):
        pytest.skip("XLA of jax 0.10 copies the slice for a Mosaic kernel")
    aot = AOT("h200")
    shape, layers = (4096, 4096), 6
    _, scanned = loss_of(shape, implementation)
    stacked = (aot.spec((layers, 4096, 2048), jnp.uint8), aot.spec((layers, 4096, 64), jnp.float32))
    x, options = aot.spec((256, 4096), jnp.bfloat16), {"xla_gpu_enable_triton_gemm": False}
    text = aot.compile(jax.grad(scanned), x, stacked, options=options).as_text()
    assert not re.findall(r"= u8\[(?:1,)?4096,2048\]\S* (?:fusion|copy)\(.*", text)
