"""The norm of a residual stream that is handed through, by XLA and by Triton in the interpreter, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import REGISTRY, config, reference, rms_norm_in_stream, triton
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.resources import of_triton

EPS = 1e-3
#: Float32 sums over a row; one rounding of a result and, before an offset-free scale, one of the normalised row.
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2**-8, jnp.float16: 2**-11}


def operands(dtype, shape=(2, 37, 96), offset=0.0, seed=0):
    """x, weight, and the gradients of x and of the normalised rows."""
    rng = np.random.default_rng(seed)
    x, dresidual, dnormed = rng.standard_normal((3, *shape))
    x[..., 0, :] = 0.0
    weight = 1 - offset + 0.3 * rng.standard_normal(shape[-1])
    return [jnp.asarray(array, dtype) for array in (x, weight, dresidual, dnormed)]


def exact(arrays, offset):
    """The normalised rows and the gradients of x and weight in float64."""
    with jax.enable_x64(True):
        x, weight, *gradients = (array.astype(jnp.float64) for array in arrays)
        normed, pullback = jax.vjp(functools.partial(reference.rms_norm, eps=EPS, offset=offset), x, weight)
        dx, dweight = pullback(gradients[1])
        return normed, dx + gradients[0], dweight


def results(arrays, offset, implementation=None):
    x, weight, *gradients = arrays
    op = functools.partial(rms_norm_in_stream, eps=EPS, offset=offset, implementation=implementation)
    (handed, normed), pullback = jax.vjp(op, x, weight)
    assert handed.shape == x.shape
    return normed, *pullback(tuple(gradients))


def close(found, expected, dtype):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype and not np.isnan(np.asarray(ours, np.float32)).any()
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) < TOLERANCE[dtype] * np.linalg.norm(theirs)


def interpreted(monkeypatch, rows):
    """The kernels in jax.numpy in place of XLA's."""
    kernels = REGISTRY["xla"]._replace(
        forward=lambda *arguments: triton.forward(*arguments, True),
        backward=lambda *arguments: triton.backward(*arguments, rows, True),
    )
    monkeypatch.setitem(REGISTRY.implementations, "xla", kernels)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_xla_matches_float64(offset, dtype):
    arrays = operands(dtype, offset=offset)
    close(results(arrays, offset), exact(arrays, offset), dtype)


@pytest.mark.exhaustive(
    *("100-96-float32-0.0", "100-96-bfloat16-1.0", "37-96-bfloat16-0.0", "37-96-float32-1.0"),
    *("10-64-bfloat16-0.0", "10-64-float16-1.0", "1-96-float16-0.0", "1-96-bfloat16-1.0"),
)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
# all rows in one program; runs that divide the rows, that do not, and of one row; whole vectors and masked ones
@pytest.mark.parametrize("rows, width", [(100, 96), (37, 96), (10, 64), (1, 96)])
def test_triton_in_the_interpreter_matches_float64(monkeypatch, rows, width, dtype, offset):
    interpreted(monkeypatch, rows)
    arrays = operands(dtype, (2, 37, width), offset)
    close(results(arrays, offset, "xla"), exact(arrays, offset), dtype)


def test_programs_have_all_rows_between_them():
    for rows, features in ((1, 64), (8192, 2048), (8191, 4096), (8193, 8192), (100, 2304)):
        run = config.rows_of_program(rows, features)
        assert run * -(-rows // run) >= rows and 1 <= config.warps(features) <= 32


def test_what_cannot_be_served_is_refused():
    x, weight, *_ = operands(jnp.float32)
    with pytest.raises(ValueError, match=r"rms_norm_in_stream: .* \(96,\), got \(95,\)"):
        rms_norm_in_stream(x, weight[1:], eps=EPS)
    with pytest.raises(NotImplementedError, match="'triton' cannot serve this call: it needs an NVIDIA GPU"):
        rms_norm_in_stream(x, weight, eps=EPS, implementation="triton")


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive("4096-h200")
@pytest.mark.parametrize(
    ("features", "card"),
    [*((features, "h200") for features in (2048, 2304, 4096, 8192)), (8192, "a100-80"), (2304, "4090"), (8192, "4090")],
)
def test_nothing_spills(features, card, tmp_path):
    aot = AOT(card)
    rows = (4, 2048, features)
    specs = [aot.spec(shape, jnp.bfloat16) for shape in (rows, (features,), rows, rows)]  # `operands` draws numbers
    found = of_triton(aot, lambda *arrays: results(arrays, 0.0, "triton"), *specs, folder=tmp_path)
    assert found is None or found.spill_bytes == found.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("features", [2048, 2304, 8192])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_on_a_card(features, dtype):
    arrays = operands(dtype, (3, 1021, features))
    run = jax.jit(lambda arrays: results(arrays, 0.0, "triton"))
    found = run(arrays)
    close(found, exact(arrays, 0.0), dtype)
    assert all(bool(jnp.array_equal(one, other)) for one, other in zip(found, run(arrays), strict=True))
