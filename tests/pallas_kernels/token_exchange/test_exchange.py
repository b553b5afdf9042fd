"""Exchanges on CPU devices: the values, the gradients, and who serves whom."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.parallel import make_mesh
from pallas_kernels.token_exchange import all_tokens, own_sums


def island(op, axis, devices):
    """`op` of a device's part, jitted; the results of all devices lie one after another along the axis."""
    mesh = make_mesh(tensor=devices, devices=jax.devices()[:devices])
    place = P(*[None] * axis, "tensor")
    local = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=place, out_specs=place, check_vma=False))
    return lambda array: local(jax.device_put(array, NamedSharding(mesh, place)))


@pytest.mark.parametrize(("devices", "axis"), [(2, 0), (4, 1)])
def test_all_have_the_parts_and_each_its_sums(devices, axis):
    rng, shape = np.random.default_rng(), [4, 8, 16]
    whole = jnp.asarray(rng.normal(size=shape), jnp.float32)
    found = island(lambda x: all_tokens(x, "tensor", axis), axis, devices)(whole)
    for piece in np.split(np.asarray(found), devices, axis=axis):
        np.testing.assert_array_equal(piece, whole)
    shape[axis] *= devices
    shares = rng.normal(size=shape).astype(np.float32)
    sums = island(lambda x: own_sums(x, "tensor", axis), axis, devices)(shares)
    exact = np.sum(np.split(shares.astype(np.float64), devices, axis=axis), axis=0)
    np.testing.assert_allclose(sums, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_in_16_bits_are_rounded_once(axis):
    shape = [4, 64, 8]
    shape[axis] *= 8
    shares = np.random.default_rng().integers(-255, 256, [8, *shape])  # exact in bfloat16, their sums in float32
    sums = island(lambda x: own_sums(x, "tensor", axis), axis, 8)(
        jnp.asarray(np.concatenate(shares, axis), jnp.bfloat16)
    )
    np.testing.assert_array_equal(sums, jnp.asarray(shares.sum(axis=0), jnp.bfloat16))


@pytest.mark.parametrize(("devices", "axis"), [(2, 1), (4, 0)])
def test_only_what_travels_is_rounded(devices, axis):
    """A device's own share counts as it is, the others' in bfloat16; the gradient is that of plain sums."""
    shape = [4, 4, 8]
    shape[axis] *= devices
    shares = np.random.default_rng().normal(size=[devices, *shape]).astype(np.float32)

    def sums(x):
        return own_sums(x, "tensor", axis, None, jnp.bfloat16)

    found = island(sums, axis, devices)(np.concatenate(shares, axis))
    rounded = np.asarray(jnp.asarray(shares, jnp.bfloat16), np.float64)
    for device, piece in enumerate(np.split(np.asarray(found), devices, axis=axis)):
        addends = rounded.copy()
        addends[device] = shares[device]
        exact, expected = (np.split(each, devices, axis + 1)[device].sum(axis=0) for each in (shares, addends))
        np.testing.assert_allclose(piece, expected, rtol=1e-6, atol=1e-6)
        assert np.abs(piece - exact).max() > 1e-4
    gradient = island(lambda x: jax.grad(lambda x: jnp.sum(sums(x)))(x), axis, devices)(np.concatenate(shares, axis))
    np.testing.assert_array_equal(gradient, np.ones_like(gradient))


def test_the_gradient_of_each_is_the_other():
    """The gradient of Σ own_sums(sin(all_tokens(x)))² equals that of Σ (devices · sin x)² on one device."""
    devices, x = 2, jnp.asarray(np.random.default_rng().normal(size=(4, 8)), jnp.float32)

    def loss(x):
        return jnp.sum(own_sums(jnp.sin(all_tokens(x, "tensor", 0)), "tensor", 0) ** 2)

    found = island(jax.grad(loss), 0, devices)(x)
    # Every device adds the same sines, so that a sum is D times one of them; and the losses of all devices are added.
    expected = jax.grad(lambda x: jnp.sum((devices * jnp.sin(x)) ** 2))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [all_tokens, own_sums])
def test_a_forced_kernel_that_cannot_serve_is_refused(op):
    x = jnp.ones((4, 1024, 1024), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"token_exchange.*it needs an NVIDIA GPU of compute capability 9.0"):
        island(functools.partial(op, axis_name="tensor", axis=0, implementation="mosaic"), 0, 2)(x)
