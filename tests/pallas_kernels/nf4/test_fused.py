"""The kernels that decode as they multiply, interpreted, against sums in float64; who is refused; who is chosen."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.nf4 import config, mosaic_sm90
from pallas_kernels.nf4.config import MatmulRsConfig, MatvecConfig
from pallas_kernels.nf4.mosaic_sm90.stream_k import StreamK
from tests.pallas_kernels.nf4.test_matmul import quantised
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.interpreter import mosaic_interpreter

# Largest error over largest value: one rounding to the dtype of a sum in float32.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}
# And that of the sixteen values in the dtype, in the same terms.
TABLE = {"bfloat16": 2**-10, "float16": 2**-13}


def case(shape, rows, dtype, gradient, decoded=None):
    """x, a matrix quantised from normal values, and its product in float64 with what it decodes to, in x's dtype."""
    rng = np.random.default_rng(rows)
    codes, absmax, dense = quantised(rng.standard_normal(shape).astype(np.float32), "split", decoded or dtype)
    dense = np.asarray(dense, np.float64) if gradient else np.asarray(dense, np.float64).T
    x = jnp.asarray(rng.standard_normal((rows, dense.shape[0])), dtype)
    return x, codes, absmax.reshape(shape[0], -1), np.asarray(x, np.float64) @ dense


def assert_close(actual, expected, dtype, more=0.0):
    assert actual.dtype == dtype and actual.shape == expected.shape
    tolerance = (TOLERANCE[dtype] + more) * np.abs(expected).max()
    assert np.abs(np.asarray(actual, np.float64) - expected).max() <= tolerance


@pytest.mark.parametrize(
    "rows, shape, dtype, sizes, cores",
    [
        pytest.param(1, (80, 512), "bfloat16", MatvecConfig(tiles=2), 2, id="one row, a tile moved back"),
        pytest.param(11, (128, 1280), "float16", MatvecConfig(4, 2, 1, splits=2), 3, id="parts that end unequally"),
    ],
)
def test_matvec(rows, shape, dtype, sizes, cores):
    x, codes, absmax, expected = case(shape, rows, dtype, gradient=False, decoded="float32")
    with mosaic_interpreter() as interpret:
        addends = mosaic_sm90.matvec(x, codes, absmax, config=sizes, cores=cores, interpret=interpret)
    assert addends.shape[0] == sizes.splits and (sizes.splits == 1 or addends.dtype == jnp.float32)
    assert_close(jnp.sum(addends, axis=0).astype(dtype), expected, dtype, TABLE[dtype])


def test_large_tiles_leave_few_multiprocessors_idle_and_fit_shared_memory():
    """Of 9 rows and more, as measured (docs/lab/nf4.md); a Hopper thread block has 227 KiB, the table takes 64."""
    shapes = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
    sizes = [config.matvec_config(32, shape, 132) for shape in shapes]
    assert [(each.tiles, each.splits) for each in sizes] == [(3, 2), (4, 4), (7, 1), (4, 4)]
    for rows in range(9, 33):
        for shape in (*shapes, (128, 256), (192, 2048), (1536, 2048)):
            each = config.matvec_config(rows, shape, 132)
            assert each.rows <= shape[0]
            assert each.stages * each.stage(rows) + each.sums(rows) + 64 * 1024 <= 226 * 1024


@pytest.mark.newer_jax("the interpreter of jax 0.10 misplaces rows behind the end of an array")
@pytest.mark.exhaustive("tiles cut in two", "odd steps, a tile moved back", "gradient, tiles cut")
@pytest.mark.parametrize(
    "gradient, rows, shape, dtype, sizes, cores",
    [
        pytest.param(False, 70, (128, 512), "bfloat16", MatmulRsConfig(64, 1), 2, id="tiles cut in two"),
        pytest.param(False, 1, (128, 256), "float16", MatmulRsConfig(64, 1, splits=1), 1, id="one row"),
        pytest.param(False, 260, (192, 768), "float16", MatmulRsConfig(256, 1), 3, id="odd steps, a tile moved back"),
        pytest.param(False, 130, (320, 256), "bfloat16", MatmulRsConfig(128, 1, splits=1), 2, id="whole tiles"),
        pytest.param(True, 70, (384, 512), "bfloat16", MatmulRsConfig(64, 1), 3, id="gradient, tiles cut"),
        pytest.param(False, 70, (256, 1024), "bfloat16", MatmulRsConfig(128, 1, 3), 7, id="three equal parts"),
        pytest.param(True, 260, (256, 256), "float16", MatmulRsConfig(256, 1, 1), 2, id="gradient, whole tiles"),
    ],
)
def test_matmul_rs(gradient, rows, shape, dtype, sizes, cores):
    x, codes, absmax, expected = case(shape, rows, dtype, gradient)
    with mosaic_interpreter() as interpret:
        found = mosaic_sm90.matmul_rs(
            x, codes, absmax, gradient=gradient, config=sizes, cores=cores, interpret=interpret
        )
    assert_close(found, expected, dtype)


def product(x, shape, **options):
    """Trace nf4.matmul and its gradient for an H200: the names of the kernels."""
    codes = jax.ShapeDtypeStruct((shape[0] * shape[1] // 64, 32), jnp.uint8)
    absmax = jax.ShapeDtypeStruct((shape[0] * shape[1] // 64,), jnp.float32)

    def both(x, codes, absmax):
        y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=shape, **options), x)
        return pullback(y)

    with AOT().tracing():
        text = str(jax.make_jaxpr(both)(x, codes, absmax))
    return sorted(set(re.findall(r"\bnf4_(\w+)", text)))


@needs_cuda_plugin
def test_rows_choose_the_kernel():
    def chosen(*rows, dtype=jnp.bfloat16, shape=(1024, 2048)):
        return product(jax.ShapeDtypeStruct((*rows, shape[1]), dtype), shape)

    assert chosen(1) == chosen(2, 8) == ["matmul_rs_gradient", "matvec"]
    assert chosen(2, 30, dtype=jnp.float16) == chosen(2, 100) == ["matmul_rs", "matmul_rs_gradient"]
    assert chosen(1, shape=(192, 512)) == ["dequantize", "matvec"]
    assert chosen(200, shape=(320, 256)) == ["dequantize", "matmul_rs"]
    most, least = (config.most_rows(gradient) for gradient in (False, True))
    assert chosen(least + 1) == chosen(most) == ["dequantize", "matmul_rs"]
    assert chosen(1, shape=(1024, 192)) == chosen(200, shape=(192, 512)) == ["dequantize"]
    assert chosen(most + 1) == chosen(1, dtype=jnp.float32) == chosen(1, shape=(100, 64)) == ["dequantize"]


@pytest.mark.parametrize(
    "rows, shape, gradient, splits",
    [
        (512, (14336, 4096), False, None),  # 112 tiles for 66 clusters
        (512, (4096, 14336), False, 2),  # 32
        (1024, (4096, 14336), False, 1),  # 64
        (512, (14336, 4096), True, 2),  # 64 tiles for 132 thread blocks
        (256, (4096, 14336), True, 1),  # 112, of 32 steps: fewer than cutting costs
    ],
)
def test_tiles_are_cut_where_whole_ones_leave_multiprocessors_idle(rows, shape, gradient, splits):
    assert config.product_config(rows, shape, gradient, 132).splits == splits


def test_equal_parts_begin_at_the_same_steps_of_every_tile():
    schedule = StreamK.of(512, 4096, 14336, MatmulRsConfig(splits=2), 66)
    assert schedule.ctas == 64 and schedule.needs_fixup
    assert [int(schedule.begin(cluster)) for cluster in range(65)] == [56 * cluster for cluster in range(65)]
    whole = StreamK.of(512, 4096, 14336, MatmulRsConfig(splits=1), 66)
    assert whole.ctas == 32 and not whole.needs_fixup


@needs_cuda_plugin
@pytest.mark.parametrize(
    "shape, rows, dtype, options, reason",
    [
        ((256, 256), 4, "float32", {}, "bfloat16 or float16, not float32"),
        ((256, 96), 4, "bfloat16", {}, "sides are multiples of 64 from 128 on, this is 256×96"),
        ((64, 256), 4, "bfloat16", {}, "sides are multiples of 64 from 128 on, this is 64×256"),
        ((256, 256), 0, "bfloat16", {}, "x has no rows"),
        ((256, 384), 33, "bfloat16", {}, "no kernel takes x Wᵀ of 33 rows with 256×384"),
        ((256, 256), 4, "bfloat16", {"order": "bitsandbytes"}, "these are in 'bitsandbytes' order"),
        ((256, 256), 4, "bfloat16", {"quant_map": jnp.arange(16.0)}, "the quant_map differs"),
    ],
)
def test_refusals_say_why(shape, rows, dtype, options, reason):
    x = jax.ShapeDtypeStruct((rows, shape[1]), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        product(x, shape, implementation="fused", **options)


def test_other_targets_are_refused():
    x, codes, absmax, _ = case((128, 128), 4, "bfloat16", gradient=False)
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="it needs an NVIDIA GPU of compute capability 9.0"):
            nf4.matmul(x, codes, absmax, shape=(128, 128), implementation="fused")
