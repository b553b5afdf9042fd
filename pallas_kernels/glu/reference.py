"""Gated linear units in plain jax.numpy: the oracle, and the table of activations."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_gelu_tanh = partial(jax.nn.gelu, approximate=True)

# Hugging Face's names (``hidden_act``); several stand for the same function.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def glu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], *, activation: str) -> Float[Array, "*rows F"]:
    """activation(gate) · up in gate's dtype, computed in float32 (float64 for float64); arguments as in ``api.glu``."""
    wide = jnp.float64 if gate.dtype == jnp.float64 else jnp.float32
    return (ACTIVATIONS[activation](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
