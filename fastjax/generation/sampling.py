"""Sampling of the next token from its logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.limits import MAX_INTEGER, MAX_MAGNITUDE


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, seed: int = 0) -> None:
    """Check that settings are within their ranges.

    Raises:
        ConfigError: names the setting.
    """
    if not 0 <= temperature <= MAX_MAGNITUDE:
        raise ConfigError(f"temperature: expected a finite number >= 0, got {temperature!r}")
    if top_k is not None and not 1 <= top_k <= MAX_INTEGER:
        raise ConfigError(f"top_k: expected a positive integer up to {MAX_INTEGER}, got {shown(top_k)}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p: expected a number above 0 and up to 1, got {top_p!r}")
    if abs(seed) > MAX_INTEGER:
        raise ConfigError(f"seed: expected an integer of 32 bits, got {shown(seed)}")


def sample(
    logits: Float[Array, "B V"], key: PRNGKeyArray, *, temperature: float, top_k: int | None, top_p: float | None
) -> Int[Array, "B"]:
    """One token a row.

    Args:
        logits: of the next token.
        key: random state of this step.
        temperature: divides the logits; 0 takes the likeliest token, and so does what is 0 among normal float32.
        top_k: only the k likeliest tokens.
        top_p: only the likeliest tokens of this total probability (Holtzman et al., arXiv 1904.09751).
    """
    if temperature < jnp.finfo(jnp.float32).tiny:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature  # the likeliest is 0: it overflows never
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        least = jnp.min(jnp.where(before < top_p, ordered, ordered[:, :1]), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
