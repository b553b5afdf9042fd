"""A model's logits of tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel, check_logits
from fastjax.models.decoder import lm_logits


def logits(
    model: LanguageModel,
    tokens: Int[Array, "B S"] | Any,
    *,
    segment_ids: Int[Array, "B S"] | Any = None,
    positions: Int[Array, "B S"] | Any = None,
    adapters: bool = True,
) -> Float[Array, "B S V"]:
    """The logits of each place's next token, without dropout; compiled once a shape.

    Args:
        model: with or without an adapter.
        tokens: ids, [B, S], in any form that NumPy takes.
        segment_ids: document of each token, 0 for padding; None: every row is one document.
        positions: of each token in its document; needed with `segment_ids`.
        adapters: False: the base model's.

    Returns:
        float32.

    Raises:
        ConfigError: shapes or ids that do not fit.
    """
    check_logits(model, "logits")
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 2 or not tokens.size:
        raise ConfigError(f"tokens: expected rows of tokens, [B, S], got {list(tokens.shape)}")
    if tokens.shape[1] > model.max_seq_length:
        raise ConfigError(
            f"tokens: expected at most {model.max_seq_length} a row, max_seq_length, got {tokens.shape[1]}"
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= model.config.vocab_size:
        raise ConfigError(
            f"tokens: expected ids from 0 to {model.config.vocab_size - 1}, got {lowest if lowest < 0 else highest}"
        )
    given = {"segment_ids": segment_ids, "positions": positions}
    for name, array in given.items():
        if array is not None and jnp.shape(array) != tokens.shape:
            raise ConfigError(
                f"{name}: expected the shape of tokens, {list(tokens.shape)}, got {list(jnp.shape(array))}"
            )
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        if segment_ids is not None:
            raise ConfigError("positions: expected those of each token in its document beside segment_ids, got none")
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    positions = jnp.asarray(positions, jnp.int32)
    return _compiled(model.graphdef, adapters)(model.trainable, model.frozen, tokens, positions, segment_ids)


@functools.lru_cache(maxsize=8)
def _compiled(graphdef: nnx.GraphDef, adapters: bool) -> Any:
    @jax.jit
    def compute(trainable: Any, frozen: Any, tokens: Array, positions: Array, segment_ids: Array | None) -> Array:
        decoder = nnx.merge(graphdef, trainable, frozen)
        hidden = decoder(tokens, positions, segment_ids, adapters=adapters)
        return lm_logits(decoder.lm_head, decoder.head_input(hidden, None), adapters=adapters).astype(jnp.float32)

    return compute
