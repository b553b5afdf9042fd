"""What a model computes for a caller: logits of tokens, and a line that says what it is."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from fastjax.errors import ConfigError
from fastjax.language_model.rewards import check_logits
from fastjax.models.decoder import lm_logits
from fastjax.quantization.weight import Weight

if TYPE_CHECKING:
    from fastjax.language_model.model import LanguageModel


def logits_of(
    model: "LanguageModel", tokens: Any, segment_ids: Any, positions: Any, adapters: bool
) -> Float[Array, "B S V"]:
    """See `LanguageModel.logits`."""
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
    def logits(trainable: Any, frozen: Any, tokens: Array, positions: Array, segment_ids: Array | None) -> Array:
        decoder = nnx.merge(graphdef, trainable, frozen)
        hidden = decoder(tokens, positions, segment_ids, adapters=adapters)
        return lm_logits(decoder.lm_head, decoder.head_input(hidden, None), adapters=adapters).astype(jnp.float32)

    return logits


def described(model: "LanguageModel") -> str:
    """The model in a line: family, size, what is trained, formats, dtype, rows, device.

    Args:
        model: the model.
    """
    config, leaves = model.config, jax.tree.leaves(model.frozen, is_leaf=lambda leaf: isinstance(leaf, Weight))
    parts = [f"{config.model_type}, {config.num_hidden_layers} layers of width {config.hidden_size}"]
    trained, every = model.num_parameters() if model.trainable is not None else (0, 0)
    if every:
        kind = "every weight" if model.full_finetuning else "nothing" if model.lora is None else f"r={model.lora.r}"
        parts.append(
            f"{every:,} parameters, trained: {kind}" + (f" ({trained:,}, {trained / every:.2%})" if trained else "")
        )
    formats = sorted({type(leaf).__name__.removesuffix("Weight") for leaf in leaves if isinstance(leaf, Weight)})
    parts.append(" and ".join([*formats, str(model.dtype)]))
    parts.append(f"rows of {model.max_seq_length:,}")
    arrays = jax.tree.leaves((model.trainable, model.frozen))
    devices = {device for array in arrays if isinstance(array, jax.Array) for device in array.devices()}
    if devices:
        first = min(devices, key=lambda device: device.id)
        parts.append(first.device_kind if len(devices) == 1 else f"{len(devices)} × {first.device_kind}")
    return f"LanguageModel({'; '.join(parts)})"
