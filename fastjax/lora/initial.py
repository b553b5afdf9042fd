"""Initial values of fresh adapters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.errors import ConfigError

#: The supported values of init_lora_weights.
INITIALISERS = (True, False, "gaussian", "orthogonal")


def initial_arrays(
    key: PRNGKeyArray, method: bool | str, rank: int, in_features: int, out_features: int
) -> tuple[Float[Array, "R in"], Float[Array, "out R"]]:
    """A and B of a fresh adapter, float32.

    Args:
        key: random state.
        method: True: A uniform in ±1/√in (Kaiming with a = √5, as PEFT), B zero; "gaussian": A normal with standard
            deviation 1/r, B zero; False: A as with True, B uniform in ±1/√r (the adapter changes the model at once);
            "orthogonal": rows of A and columns of B from one random orthogonal matrix, so that A·Aᵀ and Bᵀ·B are
            diagonal and B·A starts at zero.
        rank: R; even with "orthogonal".
        in_features: columns of the weight.
        out_features: rows of the weight.

    Raises:
        ConfigError: an unknown method.
    """
    first, second = jax.random.split(key)
    zero = jnp.zeros((out_features, rank), jnp.float32)
    if method == "gaussian":
        return jax.random.normal(first, (rank, in_features), jnp.float32) / rank, zero
    if method == "orthogonal":
        return _orthogonal(first, second, rank, in_features, out_features)
    if not isinstance(method, bool):
        raise ConfigError(f"init_lora_weights: expected one of {list(INITIALISERS)}, got {method!r}")
    bound = 1 / math.sqrt(in_features)
    a = jax.random.uniform(first, (rank, in_features), jnp.float32, -bound, bound)
    if method:
        return a, zero
    bound = 1 / math.sqrt(rank)
    return a, jax.random.uniform(second, (out_features, rank), jnp.float32, -bound, bound)


def initial_embedding(
    key: PRNGKeyArray, method: bool | str, rank: int, vocabulary: int, width: int
) -> tuple[Float[Array, "R V"], Float[Array, "E R"]]:
    """A and B of an embedding's fresh adapter, float32: A zero, B standard normal; with False, A standard normal too.

    Args:
        key: random state.
        method: as in `initial_arrays`; only False differs.
        rank: R.
        vocabulary: rows of the table.
        width: columns of the table.
    """
    first, second = jax.random.split(key)
    a = jnp.zeros((rank, vocabulary), jnp.float32)
    if method is False:
        a = jax.random.normal(first, a.shape, jnp.float32)
    return a, jax.random.normal(second, (width, rank), jnp.float32)


def _orthogonal(first, second, rank: int, in_features: int, out_features: int) -> tuple[Array, Array]:
    """Even and odd rows of one orthogonal matrix span A and B (PEFT's "orthogonal", with its factor of a tenth)."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(first)).astype(np.uint32).tolist())
    q, _ = np.linalg.qr(rng.standard_normal((rank, rank)))
    q_odd, q_even = q[0::2], q[1::2]
    left, right = jax.random.split(second)
    a = np.asarray(jax.random.normal(left, (in_features, rank // 2), jnp.float32)) @ q_odd / 10.0
    b = q_even.T @ np.asarray(jax.random.normal(right, (rank // 2, out_features), jnp.float32)) / 10.0
    return jnp.asarray(a.T, jnp.float32), jnp.asarray(b.T, jnp.float32)
