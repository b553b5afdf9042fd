"""The kernels as the last of several devices, in Mosaic's interpreter, which knows one: they wait for nobody."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_exchange.mosaic_sm90 import gather, scatter
from tests.support.interpreter import mosaic_interpreter


@pytest.mark.parametrize(
    ("devices", "axis", "dtype", "travel"),
    [(2, 0, "bfloat16", "bfloat16"), (3, 1, "float32", "float32"), (3, 1, "float32", "bfloat16")],
)
def test_as_collectives_do(devices, axis, dtype, travel):
    rng, shape = np.random.default_rng(), [2, 3, 4096]
    shape[axis] *= devices
    whole = jnp.asarray(rng.normal(size=shape), dtype)
    parts = jnp.stack(jnp.split(whole, devices, axis=axis))
    shares = jnp.asarray(rng.normal(size=(devices, *shape)), dtype)
    with mosaic_interpreter() as interpret:
        found = gather(parts, "tensor", axis, interpret=interpret)
        sums = scatter(shares, "tensor", axis, travel, interpret=interpret)
    np.testing.assert_array_equal(found, whole)
    # In the kernel's order: its own share, then those of the devices behind it.
    *others, own = jnp.split(shares, devices, axis=axis + 1)[-1].astype(jnp.float32)
    for other in others:
        own += other.astype(travel).astype(jnp.float32)
    np.testing.assert_array_equal(sums, own.astype(dtype))
