"""What rounding leaves of an adapter's addend where devices share a layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fastjax.execution.tensor_parts import TensorTokens
from fastjax.lora.params import LoraLinear
from fastjax.models.mlp import MLP
from fastjax.models.projection import Projection
from fastjax.parallel import local, make_mesh
from pallas_kernels.dispatch import Implementation, Registry
from pallas_kernels.low_rank import api, triton
from tests.fastjax.lora.conftest import Maker

WIDTH, FEATURES, ROWS, LENGTH, RANK = 128, 256, 2, 256, 8
#: Of B: addends of a thousandth of what they are added to, a fourth of a bfloat16's last place.
SIZE = 4e-4


@pytest.mark.parametrize("block", ["projection", "gated block"])
@pytest.mark.parametrize("split", [0, 1])
def test_addends_of_adapters_count_on_several_devices(block, split, monkeypatch):
    """In bfloat16, by the kernel that adds them, about as much as the mathematics has it, and as on one device.

    Added to a device's share of the product, which is rounded already, half of these would be lost.
    """
    kernel = Implementation(functools.partial(triton.add, interpret=True))
    monkeypatch.setattr(api, "ADD", Registry("low_rank.add", {"triton": kernel}))
    maker = Maker(1)
    x = maker.normal(ROWS, LENGTH, FEATURES if block == "projection" else WIDTH, dtype=jnp.bfloat16)
    residual = maker.normal(ROWS, LENGTH, WIDTH, dtype=jnp.bfloat16)
    gate, up = (maker.normal(FEATURES, WIDTH, scale=2 * WIDTH**-0.5, dtype=jnp.bfloat16) for _ in range(2))
    back = maker.normal(WIDTH, FEATURES, scale=FEATURES**-0.5, dtype=jnp.bfloat16)
    a, b = maker.normal(RANK, FEATURES, scale=FEATURES**-0.5), maker.normal(WIDTH, RANK, scale=SIZE)

    def output(x, gate, up, back, a, b, residual, tokens=None):
        adapter = LoraLinear(a, b, None, scaling=1.0, dropout=0.0)
        down = Projection([("down_proj", WIDTH)], back, adapters={"down_proj": adapter})
        if tokens is not None:
            down.output_tokens = tokens
        if block == "projection":
            return down(x, residual=residual)[0]
        inner = Projection([("gate_proj", len(gate)), ("up_proj", len(up))], jnp.concatenate([gate, up]))
        return MLP("silu", inner, down)(x, None, residual)

    def shared(*arrays):
        read = P(None, None, "tensor") if block == "projection" else P()
        rows = P("tensor") if split == 0 else P(None, "tensor")
        weights = P("tensor"), P("tensor"), P(None, "tensor"), P(None, "tensor"), P()

        def own(*arrays):
            return output(*arrays, tokens=TensorTokens(split))

        return local(own, in_specs=(read, *weights, rows), out_specs=rows)(*arrays)

    def change(function, dtype):
        """What B makes of the outputs."""
        arrays = [array.astype(dtype) for array in (x, gate, up, back)]
        stream = residual.astype(dtype)
        found = [np.asarray(function(*arrays, a, one, stream), np.float64) for one in (b, 0 * b)]
        return found[0] - found[1]

    exact = change(jax.jit(output), jnp.float32)
    alone = change(jax.jit(output), jnp.bfloat16)
    with jax.set_mesh(make_mesh(tensor=2)):
        found, wide = change(jax.jit(shared), jnp.bfloat16), change(jax.jit(shared), jnp.float32)
    np.testing.assert_allclose(wide, exact, atol=1e-2 * np.abs(exact).max())

    def share(change):
        return np.sum(change * exact) / np.sum(exact * exact)

    assert 0.85 < share(found) < 1.35
    assert abs(share(found) - share(alone)) < 0.1
