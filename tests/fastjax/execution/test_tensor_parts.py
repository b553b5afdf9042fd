"""Projections back to the residual stream, split over two devices: values, gradients, and rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fastjax.execution.tensor_parts import TensorTokens
from fastjax.lora.params import LoraLinear
from fastjax.lora.units import WHOLE
from fastjax.models.mlp import MLP
from fastjax.models.projection import Projection
from fastjax.parallel import local, make_mesh
from pallas_kernels.dispatch import Implementation, Registry
from pallas_kernels.low_rank import api, triton
from tests.fastjax.lora.conftest import Maker, distance

WIDTH, FEATURES, ROWS, LENGTH, RANK = 128, 256, 2, 256, 8
#: Of B: what it adds is then about a thousandth of what it is added to, whose last bit is four times as large.
SMALL = 4e-4
BLOCKS = pytest.mark.parametrize("block", ["projection", "gated block"])
#: Rows on the devices, or the tokens of each.
SPLITS = pytest.mark.parametrize("split", [0, 1])


def arrays_of(block, size_of_B):
    """x, gate, up, the matrix back, its bias, A, B, and the residual stream, in float32."""
    maker = Maker(1)
    return (
        maker.normal(ROWS, LENGTH, FEATURES if block == "projection" else WIDTH),
        *(maker.normal(FEATURES, WIDTH, scale=2 * WIDTH**-0.5) for _ in range(2)),
        maker.normal(WIDTH, FEATURES, scale=FEATURES**-0.5),
        maker.normal(WIDTH),
        maker.normal(RANK, FEATURES, scale=FEATURES**-0.5),
        maker.normal(WIDTH, RANK, scale=size_of_B),
        maker.normal(ROWS, LENGTH, WIDTH),
    )


def alone(block, x, gate, up, back, bias, a, b, residual, tokens=WHOLE, base_compute=None):
    """The residual stream with a projection's or a gated block's output."""
    adapter = LoraLinear(a, b, None, scaling=1.0, dropout=0.0)
    down = Projection([("down_proj", WIDTH)], back, bias, {"down_proj": adapter}, base_compute=base_compute)
    down.output_tokens = tokens
    if block == "projection":
        return down(x, residual=residual)[0]
    inner = Projection([("gate_proj", len(gate)), ("up_proj", len(up))], jnp.concatenate([gate, up]))
    return MLP("silu", inner, down)(x, None, residual)


def shared(block, split, *arrays, **options):
    """The same on two devices that share features, each with some of the residual stream."""
    read = P(None, None, "tensor") if block == "projection" else P()
    stream = P("tensor") if split == 0 else P(None, "tensor")
    matrices = P("tensor"), P("tensor"), P(None, "tensor"), P(), P(None, "tensor"), P()

    def own(*arrays):
        return alone(block, *arrays, tokens=TensorTokens(split), **options)

    return local(own, in_specs=(read, *matrices, stream), out_specs=stream)(*arrays)


@pytest.mark.exhaustive("0-gated block", "1-projection")
@BLOCKS
@SPLITS
def test_values_and_gradients_are_those_of_one_device(block, split):
    arrays = arrays_of(block, 1.0)
    dy = Maker(2).normal(ROWS, LENGTH, WIDTH)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(function, *arrays):
        y, pullback = jax.vjp(function, *arrays)
        return y, *pullback(dy)

    expected = value_and_gradients(functools.partial(alone, block), *arrays)
    with jax.set_mesh(make_mesh(tensor=2)):
        found = value_and_gradients(functools.partial(shared, block, split), *arrays)
    unread = (2, 3) if block == "projection" else ()  # gate and up
    pairs = [pair for number, pair in enumerate(zip(found, expected, strict=True)) if number not in unread]
    assert len(pairs) == 9 - len(unread) and max(distance(*map(list, zip(*pairs, strict=True)))) < 2e-6


@SPLITS
def test_products_in_float8_are_summed(split):
    """Rows that the block rounds are no array; each device's have scales of their own."""
    arrays = [array.astype(jnp.bfloat16) for array in arrays_of("gated block", 1.0)]
    expected = jax.jit(functools.partial(alone, "gated block", base_compute="float8"))(*arrays)
    with jax.set_mesh(make_mesh(tensor=2)):
        found = jax.jit(functools.partial(shared, "gated block", split, base_compute="float8"))(*arrays)
    plain = jax.jit(functools.partial(alone, "gated block"))(*arrays)
    [off], [rounding] = distance(found, expected), distance(plain, expected)
    assert off < rounding


@pytest.mark.exhaustive("0-gated block", "1-projection")
@BLOCKS
@SPLITS
def test_small_addends_count(block, split, monkeypatch):
    """In bfloat16, by the kernel that adds them, about as much as the mathematics has it, and as on one device.

    Added to a device's share of the product, which is rounded already, half of these would be lost.
    """
    kernel = Implementation(functools.partial(triton.add, interpret=True))
    monkeypatch.setattr(api, "ADD", Registry("low_rank.add", {"triton": kernel}))
    *arrays, a, b, residual = arrays_of(block, SMALL)

    def change(function, dtype):
        """What B makes of the outputs."""
        narrow, stream = [array.astype(dtype) for array in arrays], residual.astype(dtype)
        found = [np.asarray(jax.jit(function)(*narrow, a, one, stream), np.float64) for one in (b, 0 * b)]
        return found[0] - found[1]

    exact = change(functools.partial(alone, block), jnp.float32)
    one = change(functools.partial(alone, block), jnp.bfloat16)
    with jax.set_mesh(make_mesh(tensor=2)):
        two = change(functools.partial(shared, block, split), jnp.bfloat16)

    def share(change):
        return np.sum(change * exact) / np.sum(exact * exact)

    assert 0.85 < share(two) < 1.35
    assert abs(share(two) - share(one)) < 0.1
