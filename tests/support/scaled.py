"""Products in float8 whose scales stand beside them, and what they stand for."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.float8 import Scaled, scaled_values


def scaled(product, seed=0):
    """A product with random powers of two for scales, and the matrix as one array of its dtype."""
    rng = np.random.default_rng(seed)
    rows, columns = (jnp.asarray(np.exp2(rng.integers(-3, 4, size)), jnp.float32) for size in product.shape)
    found = Scaled(product, rows, columns)
    values = scaled_values(found).astype(product.dtype)
    assert not np.array_equal(values, product)
    return found, values
