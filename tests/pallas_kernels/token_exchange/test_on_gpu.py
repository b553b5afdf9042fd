"""Reading the other cards' memory: against XLA's collectives, on fresh random arrays, with poisoned results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.parallel import make_mesh
from pallas_kernels.token_exchange import all_tokens, own_sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs"),
]
SHAPES = [((4, 2048, 4096), 0), ((4, 260, 1024), 1), ((1, 1024, 2048), 1)]


def devices():
    return 4 if jax.device_count() >= 4 else 2


def island(op, axis):
    """`op` of a device's part, jitted; the results of all devices lie one after another along the axis."""
    mesh = make_mesh(tensor=devices(), devices=jax.devices()[: devices()])
    place = P(*[None] * axis, "tensor")
    local = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=place, out_specs=place, check_vma=False))
    return lambda array: local(jax.device_put(array, NamedSharding(mesh, place)))


def poison(shape, dtype):
    """Memory for results holds NaN."""
    for device in jax.devices()[: devices()]:
        jax.block_until_ready(jax.device_put(np.full(shape, np.nan, np.float32), device).astype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_as_collectives_do(shape, axis, dtype):
    rng = np.random.default_rng()
    own = jnp.asarray(rng.normal(size=shape), dtype)
    shares = jnp.asarray(
        rng.normal(size=[size * (devices() if place == axis else 1) for place, size in enumerate(shape)]), dtype
    )
    poison(shares.shape, dtype)
    found = island(lambda x: all_tokens(x, "tensor", axis, "mosaic"), axis)(own)
    for piece in np.split(np.asarray(found), devices(), axis=axis):
        np.testing.assert_array_equal(piece, own)
    sums = island(lambda x: own_sums(x, "tensor", axis, "mosaic"), axis)(shares)
    pieces = np.stack(np.split(np.asarray(shares, np.float64), devices(), axis=axis))
    exact = pieces.sum(axis=0)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}[dtype]  # rounded once, from float32
    np.testing.assert_allclose(np.asarray(sums, np.float64), exact, rtol=unit, atol=1e-6)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_shares_travel_in_16_bits(shape, axis):
    shape = [size * (devices() if place == axis else 1) for place, size in enumerate(shape)]
    shares = [np.random.default_rng().normal(size=shape).astype(np.float32) for _ in range(devices())]
    poison(shape, "float32")

    def sums(name):
        return island(lambda x: own_sums(x, "tensor", axis, name, jnp.bfloat16), axis)(np.concatenate(shares, axis))

    np.testing.assert_allclose(sums("mosaic"), sums("xla"), rtol=0, atol=2e-6)  # of more than two the order differs


def test_nobody_reads_what_is_gone_or_not_yet_there():
    """Two hundred exchanges in a row, in memory that each gives back to the next; devices that are late by turns."""

    def chain(implementation, x):
        device = jax.lax.axis_index("tensor")

        def step(number, x):
            late = jax.lax.rem(number, devices()) == device
            y = jax.lax.fori_loop(0, jnp.where(late, 20, 1), lambda _, y: jnp.sin(y) * 1.25, x)
            whole = all_tokens(y.astype(jnp.float32), "tensor", 0, implementation)
            return own_sums(jnp.cos(whole + device.astype(jnp.float32)), "tensor", 0, implementation).astype(x.dtype)

        return jax.lax.fori_loop(0, 100, step, x)

    x = jnp.asarray(np.random.default_rng().normal(size=(devices() * 256, 4096)), jnp.bfloat16)
    found, expected = (island(functools.partial(chain, name), 0)(x) for name in ("mosaic", "xla"))
    # Of two addends, which commute; of more the order differs.
    bound = 0 if devices() == 2 else 0.05
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0, atol=bound)


def test_gradients_are_each_others():
    shape, axis = (4, 512, 1024), 1
    x = jnp.asarray(np.random.default_rng().normal(size=shape), jnp.float32)

    def gradient(implementation, x):
        def loss(x):
            whole = all_tokens(x, "tensor", axis, implementation)
            own = own_sums(jnp.sin(whole), "tensor", axis, implementation)
            return jnp.sum(own * own)

        return jax.grad(loss)(x)

    found, expected = (island(functools.partial(gradient, name), axis)(x) for name in ("mosaic", "xla"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
