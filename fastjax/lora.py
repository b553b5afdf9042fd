"""Low-rank adapters beside a frozen W: W + s·B·A (LoRA, arXiv 2106.09685), and DoRA (arXiv 2402.09353).

What an adapter computes equals PEFT's, option by option; where adapters attach and how they scale is decided by
`convert.adapters`, which shares PEFT's rules with the files on disk.
"""

import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.errors import ConfigError
from fastjax.quantization.weights import linear

#: The values of init_lora_weights that are served here.
INITIALISERS = (True, False, "gaussian", "orthogonal")


class BaseParam(nnx.Param):
    """A weight of the checkpoint."""


class LoraParam(nnx.Param):
    """A weight of an adapter."""


class SavedParam(nnx.Param):
    """A weight of the checkpoint that an adapter trains whole (`modules_to_save`)."""


class LoraLinear(nnx.Module):
    """The adapter of one projection.

    Attributes:
        lora_A: [R, in].
        lora_B: [out, R].
        magnitude: [out] (DoRA), or None.
        scaling: lora_alpha / r, or lora_alpha / √r.
        dropout: probability with which an input of the adapter is zeroed while training.
    """

    def __init__(self, lora_A: Array, lora_B: Array, magnitude: Array | None, *, scaling: float, dropout: float):
        self.scaling, self.dropout = scaling, dropout
        self.lora_A, self.lora_B = LoraParam(lora_A), LoraParam(lora_B)
        self.magnitude = None if magnitude is None else LoraParam(magnitude)

    def __call__(
        self,
        x: Float[Array, "B S in"],
        base: Float[Array, "B S out"],
        dense: Callable[[], Float[Array, "out in"]],
        product: Callable[[Array], Float[Array, "B S out"]] | None,
    ) -> Float[Array, "B S out"]:
        """The projection with its adapter, without bias.

        Args:
            x: the adapter's input, after dropout.
            base: W applied to the projection's input.
            dense: gives W in float32 (DoRA's norm needs it).
            product: applies W to another input; given where x was dropped (DoRA's second term needs it).
        """
        thin = checkpoint_name(linear(x, self.lora_A[...]), "lora")
        b = self.lora_B[...].astype(jnp.float32)  # scaled in float32 and rounded once, to the dtype of x
        delta = linear(thin, b * self.scaling)
        if self.magnitude is None:
            return base + delta
        full = dense() + self.scaling * linear(b, self.lora_A[...].astype(jnp.float32).T)
        norm = jax.lax.stop_gradient(jnp.linalg.norm(full, axis=1))
        scale = (self.magnitude[...].astype(jnp.float32) / norm).astype(x.dtype)[None, None, :]
        inner = base if product is None else product(x)
        return base + (scale - 1) * inner + scale * delta


class LoraEmbedding(nnx.Module):
    """The adapter of an embedding table: lora_embedding_A [R, V], lora_embedding_B [E, R]."""

    def __init__(self, lora_embedding_A: Array, lora_embedding_B: Array, magnitude: Array | None, *, scaling: float):
        self.scaling = scaling
        self.lora_embedding_A, self.lora_embedding_B = LoraParam(lora_embedding_A), LoraParam(lora_embedding_B)
        self.magnitude = None if magnitude is None else LoraParam(magnitude)

    def __call__(
        self, tokens: Int[Array, "B S"], base: Float[Array, "B S E"], table: Float[Array, "V E"]
    ) -> Float[Array, "B S E"]:
        """The embeddings of `tokens`, whose rows in the frozen `table` are `base`."""
        thin = jnp.take(self.lora_embedding_A[...].T, tokens, axis=0).astype(base.dtype)
        b = self.lora_embedding_B[...].astype(jnp.float32)
        delta = linear(thin, b * self.scaling)
        if self.magnitude is None:
            return base + delta
        a = self.lora_embedding_A[...].astype(jnp.float32)
        full = table.astype(jnp.float32) + self.scaling * linear(a.T, b)
        norm = jax.lax.stop_gradient(jnp.linalg.norm(full, axis=0))
        scale = (self.magnitude[...].astype(jnp.float32) / norm).astype(base.dtype)[None, None, :]
        return scale * (base + delta)


def drop(x: Float[Array, "B S E"], key: PRNGKeyArray | None, name: str, rate: float) -> Float[Array, "B S E"]:
    """Inverted dropout of an adapter's input; `x` itself where there is none.

    Args:
        x: input.
        key: of the layer; None switches dropout off (evaluation, generation).
        name: of the projection: every adapter of a layer has a mask of its own.
        rate: probability of a zero.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF), 1.0 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros_like(x))


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
        rank: R.
        in_features: columns of the weight.
        out_features: rows of the weight.

    Raises:
        ConfigError: an unknown method; an odd rank with "orthogonal".
    """
    first, second = jax.random.split(key)
    zero = jnp.zeros((out_features, rank), jnp.float32)
    if method == "gaussian":
        return jax.random.normal(first, (rank, in_features), jnp.float32) / rank, zero
    if method == "orthogonal":
        return _orthogonal(first, second, rank, in_features, out_features)
    if not isinstance(method, bool):
        raise ConfigError(f"init_lora_weights: expected one of {list(INITIALISERS)}, given {method!r}")
    bound = 1 / math.sqrt(in_features)
    a = jax.random.uniform(first, (rank, in_features), jnp.float32, -bound, bound)
    if method:
        return a, zero
    bound = 1 / math.sqrt(rank)
    return a, jax.random.uniform(second, (out_features, rank), jnp.float32, -bound, bound)


def _orthogonal(first, second, rank: int, in_features: int, out_features: int) -> tuple[Array, Array]:
    """Even and odd rows of one orthogonal matrix span A and B (PEFT's "orthogonal", with its factor of a tenth)."""
    if rank % 2:
        raise ConfigError(f"init_lora_weights 'orthogonal': expected an even rank, given {rank}")
    rng = np.random.default_rng(np.asarray(jax.random.key_data(first)).astype(np.uint32).tolist())
    q, _ = np.linalg.qr(rng.standard_normal((rank, rank)))
    q_odd, q_even = q[0::2], q[1::2]
    left, right = jax.random.split(second)
    a = np.asarray(jax.random.normal(left, (in_features, rank // 2), jnp.float32)) @ q_odd / 10.0
    b = q_even.T @ np.asarray(jax.random.normal(right, (rank // 2, out_features), jnp.float32)) / 10.0
    return jnp.asarray(a.T, jnp.float32), jnp.asarray(b.T, jnp.float32)
