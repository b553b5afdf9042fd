"""The Hopper kernels compiled for an H200 at their default block sizes: no spills, no serialised products."""

import jax.numpy as jnp
import pytest

from pallas_kernels.attention import mosaic_sm90
from pallas_kernels.attention.call import Cotangents, Mask, Operands, Options
from pallas_kernels.attention.ranges import TILE, SegmentRanges
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

BATCH, LENGTH, HEADS, KEY_HEADS = 4, 4096, 32, 8
SIZES = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
#: (options, with documents)
CASES = {
    "documents and sinks": ({"query_offset": None}, True),
    "window": ({"sliding_window": 1024}, False),
    "cap": ({"logits_soft_cap": 50.0}, False),
    "documents and dropout": ({"query_offset": None, "dropout_rate": 0.1}, True),
}
pytestmark = [pytest.mark.aot, needs_cuda_plugin]


@pytest.fixture(scope="module")
def aot():
    return AOT()


def compiled(aot, size, value_size, options, documents, folder, monkeypatch):
    """The resources of the forward and of both backward kernels."""

    def int32(*shape):
        return aot.spec(shape, jnp.int32)

    def float32(*shape):
        return aot.spec(shape, jnp.float32)

    def half(heads, width):
        return aot.spec((BATCH, LENGTH, heads, width), jnp.bfloat16)

    options = Options(size**-0.5, **{"query_offset": 0} | options)
    tiles = LENGTH // TILE
    ranges = SegmentRanges(*[int32(BATCH, LENGTH)] * 4, *[int32(BATCH, tiles)] * 2) if documents else None
    q, k, v, dout = half(HEADS, size), half(KEY_HEADS, size), half(KEY_HEADS, value_size), half(HEADS, value_size)
    mask = Mask(ranges, None, None, int32(1))
    seed = aot.spec((2,), jnp.uint32) if options.dropout_rate else None
    number = float32(BATCH, HEADS, LENGTH)
    calls: dict = {
        "forward": (
            lambda *a: mosaic_sm90.forward(*a, options),
            (Operands(q, k, v, mask, float32(HEADS) if documents else None, seed),),
        ),
        "backward": (
            lambda *a: mosaic_sm90.backward(*a, options),
            (Operands(q, k, v, mask, None, seed), Cotangents(number, number, dout, dout)),
        ),
    }
    found = {}
    for name, (function, specs) in calls.items():
        (folder / name).mkdir()
        found[name] = resources.of_mosaic(aot, function, *specs, folder=folder / name, monkeypatch=monkeypatch)
        print(name, found[name])
    return found


@pytest.mark.exhaustive(by="test_options")
@pytest.mark.parametrize(("size", "value_size"), SIZES)
def test_head_sizes(size, value_size, aot, tmp_path, monkeypatch):
    found = compiled(aot, size, value_size, {}, False, tmp_path, monkeypatch)
    assert found["forward"].spill_bytes == found["backward"].spill_bytes == 0


@pytest.mark.exhaustive("documents and sinks")
@pytest.mark.parametrize("name", CASES)
def test_options(name, aot, tmp_path, monkeypatch):
    options, documents = CASES[name]
    found = compiled(aot, 128, 128, options, documents, tmp_path, monkeypatch)
    assert found["forward"].spill_bytes == found["backward"].spill_bytes == 0
