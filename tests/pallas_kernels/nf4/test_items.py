"""Products of a few tokens with their experts' packed matrices: interpreted, compiled, on the card; who is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.nf4 import config, mosaic_sm90
from pallas_kernels.nf4.config import MatvecConfig
from tests.pallas_kernels.nf4.test_matmul import quantised
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.interpreter import mosaic_interpreter

# Largest error over largest value: one rounding to the dtype of a sum in float32, and that of the sixteen values.
TOLERANCE = {"bfloat16": 2**-8 + 2**-10, "float16": 2**-11 + 2**-13}
QWEN = [(1536, 2048), (2048, 768)]


def table_of(expert_of_row, slots, most):
    """Items of a routing [rows], and their count; behind these places that no array has."""
    rows = []
    for expert in np.unique(expert_of_row):
        own = np.nonzero(expert_of_row == expert)[0]
        parts = [own[start : start + slots] for start in range(0, own.size, slots)]
        rows += [[expert, *part, *[-1] * (slots - part.size)] for part in parts]
    assert len(rows) <= most
    table = np.full((most, 1 + slots), 10**6, np.int32)
    table[: len(rows)] = rows
    return jnp.asarray(table), jnp.asarray([len(rows)], jnp.int32)


def case(rng, experts, shape, dtype):
    """Codes, scales and the decoded matrices of some experts."""
    parts = [quantised(rng.standard_normal(shape).astype(np.float32), "split", "float32") for _ in range(experts)]
    codes, absmax, dense = (jnp.stack([part[index] for part in parts]) for index in range(3))
    dense = np.asarray(dense, np.float64).reshape(experts, *shape)
    return codes.reshape(experts, shape[0], -1), absmax.reshape(experts, shape[0], -1), dense


@pytest.mark.exhaustive("pairs of a token, columns that fill")
@pytest.mark.parametrize(
    "tokens, rows, slots, shape, dtype, sizes, cores",
    [
        pytest.param(1, 3, 1, (80, 512), "bfloat16", MatvecConfig(tiles=2), 2, id="one token, a tile moved back"),
        pytest.param(
            12, 24, 8, (128, 768), "float16", MatvecConfig(2, 2, 3), 3, id="pairs of a token, columns that fill"
        ),
        pytest.param(5, 5, 3, (64, 256), "bfloat16", MatvecConfig(1, 2, 2), 2, id="rows of their own, odd slots"),
    ],
)
def test_interpreted(tokens, rows, slots, shape, dtype, sizes, cores):
    rng = np.random.default_rng(tokens)
    codes, absmax, dense = case(rng, 4, shape, dtype)
    expert = np.where(np.arange(rows) % 3 < 2, 2, rng.integers(0, 2, rows))  # one has most, one has none
    table, count = table_of(expert, slots, rows)
    x = jnp.asarray(rng.standard_normal((tokens, shape[1])), dtype)
    with mosaic_interpreter() as interpret:
        options = {"rows": rows, "config": sizes, "cores": cores, "interpret": interpret}
        (found,) = mosaic_sm90.matvec_items(x, codes, absmax, table, count, **options)
    assert found.dtype == dtype
    own = np.asarray(x, np.float64)[np.arange(rows) * tokens // rows]
    expected = np.einsum("ri,roi->ro", own, dense[expert])
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive("shape1-8-256")
@pytest.mark.parametrize("slots, rows", [(1, 8), (8, 256)])
@pytest.mark.parametrize("shape", QWEN)
def test_compiled_without_spills_or_copies(shape, slots, rows, tmp_path, monkeypatch):
    aot, most = AOT("h200"), min(rows, 128 + rows // slots)
    arrays = (
        aot.spec((128, shape[0], shape[1] // 2), jnp.uint8),
        aot.spec((128, shape[0], shape[1] // 64), jnp.float32),
        aot.spec((most, 1 + slots), jnp.int32),
        aot.spec((1,), jnp.int32),
    )
    sizes = config.items_config(most, shape, 132)
    assert shape[1] % sizes.columns == 0

    def product(*arguments):
        return nf4.matmul_items(*arguments, rows=rows)

    used = resources.of_mosaic(
        aot, product, aot.spec((rows // 8, shape[1]), jnp.bfloat16), *arrays, folder=tmp_path, monkeypatch=monkeypatch
    )
    assert used.spill_bytes == used.stack_bytes == 0


@needs_cuda_plugin
@pytest.mark.parametrize(
    "dtype, shape, order, reason",
    [
        ("float32", (256, 256), "split", "bfloat16 or float16, not float32"),
        ("bfloat16", (256, 320), "split", "multiples of 256 columns or more, this is 256×320"),
        ("bfloat16", (64, 256), "split", "it takes 128 rows"),
        ("bfloat16", (256, 256), "bitsandbytes", "in the split order"),
    ],
)
def test_refusals_say_why(dtype, shape, order, reason):
    with AOT().tracing():
        assert nf4.why_not_items("bfloat16", (256, 256), "split", True) is None
        assert reason in nf4.why_not_items(dtype, shape, order, True)
    assert "compute capability 9.0" in nf4.why_not_items("bfloat16", (256, 256), "split", True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*QWEN, (704, 1536), (192, 512), (128, 2816)])
def test_on_the_card(shape):
    """Tokens have eight experts each, one of them chosen often; x shared by a token's rows, and their own."""
    if reason := nf4.why_not_items(jnp.bfloat16, shape, "split", True):
        pytest.skip(reason)
    rng, experts = np.random.default_rng(), 40
    shape_of_codes = (experts, shape[0], shape[1] // 64, 32)
    codes = rng.integers(0, 256, shape_of_codes, dtype=np.uint8)
    absmax = np.exp(rng.normal(-2, 1, shape_of_codes[:3])).astype(np.float32)
    nibbles = np.concatenate([codes & 15, codes >> 4], axis=-1)
    dense = (nf4.NF4_VALUES[nibbles] * absmax[..., None]).reshape(experts, *shape).astype(np.float64)
    packed = jnp.asarray(codes.reshape(experts, shape[0], -1)), jnp.asarray(absmax)
    product = jax.jit(nf4.matmul_items, static_argnames="rows")
    for tokens in (1, 3, 8, 32, 64):
        rows = 8 * tokens
        chosen = np.stack([1 + rng.permutation(experts - 1)[:8] for _ in range(tokens)])
        chosen[: 2 * tokens // 3, 0] = 1
        expert, slots = chosen.reshape(-1), min(tokens, 8)
        table, count = table_of(expert, slots, min(rows, experts + rows // slots))
        for given in (tokens, rows):
            x = jnp.asarray(rng.standard_normal((given, shape[1])), jnp.bfloat16)
            jax.block_until_ready([jnp.full((rows, shape[0]), jnp.nan, jnp.bfloat16) for _ in range(2)])
            found = np.asarray(product(x, *packed, table, count, rows=rows), np.float64)
            own = np.asarray(x, np.float64)[np.arange(rows) * given // rows]
            expected = np.zeros((rows, shape[0]))
            for number in np.unique(expert):
                expected[expert == number] = own[expert == number] @ dense[number].T
            worst = np.abs(found - expected).max() / np.abs(expected).max()
            assert worst <= TOLERANCE["bfloat16"], f"{tokens} tokens, {given} rows of x"
            again = product(x, *packed, table, count, rows=rows)
            np.testing.assert_array_equal(found, np.asarray(again, np.float64))
