"""The head's operations over chunks of the sequence, for losses: each device takes its own rows and tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fastjax.models.decoder import Decoder, lm_logits
from fastjax.parallel import CONTEXT, SHARES, TENSOR, batch_devices, devices_along, local, rows_split, split_axis
from fastjax.parallel.gather import gathered, holds_shards
from pallas_kernels.cross_entropy import CrossEntropy, chunk_size_for, chunked_cross_entropy, token_log_probs


def head_cross_entropy(
    model: Decoder,
    trainable_filter: Filter,
    hidden: Float[Array, "B S C"],
    targets: Int[Array, "B S"],
    *,
    chunk_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> CrossEntropy:
    """`chunked_cross_entropy` of the model's head, summed over the devices.

    Args:
        model: the decoder, merged.
        trainable_filter: the nnx filter of the trained variables.
        hidden: `Decoder.head_input`'s result.
        targets: -100 where nothing is learnt.
        chunk_size: sequence places whose logits exist at once on a device; None: by the size of the vocabulary.
        label_smoothing: share of the loss that is the mean of −log p over the vocabulary.
        z_loss: factor of the square of the logits' logsumexp, which is added.
    """

    def device_sums(*arguments: Any) -> CrossEntropy:
        sums = chunked_cross_entropy(*arguments, **options, label_smoothing=label_smoothing, z_loss=z_loss)
        return jax.tree.map(lambda total: jnp.asarray(total)[None], sums)

    project, trained, frozen, options = _head(model, trainable_filter, hidden, chunk_size)
    rows = rows_split(len(targets))
    island = local(lambda *arrays: device_sums(project, *arrays), in_specs=(P(), P(), rows, rows), out_specs=SHARES)
    return jax.tree.map(lambda totals: jnp.sum(totals, axis=0), island(trained, frozen, hidden, targets))


def head_log_probs(
    model: Decoder,
    trainable_filter: Filter,
    hidden: Float[Array, "B S C"],
    targets: Int[Array, "B S"],
    *,
    chunk_size: int | None = None,
) -> Float[Array, "B S"]:
    """`token_log_probs` of the model's head.

    Args:
        model: the decoder, merged.
        trainable_filter: the nnx filter of the trained variables.
        hidden: `Decoder.head_input`'s result.
        targets: -100 where nothing is learnt.
        chunk_size: as for `head_cross_entropy`.
    """
    project, trained, frozen, options = _head(model, trainable_filter, hidden, chunk_size)
    rows = rows_split(len(targets))
    island = local(
        lambda *arrays: token_log_probs(project, *arrays, **options), in_specs=(P(), P(), rows, rows), out_specs=rows
    )
    return island(trained, frozen, hidden, targets)


def _head(
    model: Decoder, trainable_filter: Filter, hidden: Array, chunk_size: int | None
) -> tuple[Callable[..., Array], Any, Any, dict[str, Any]]:
    """The head as its operations take it: function, trained and frozen arrays, options.

    On a mesh the arrays go whole into an island: they are gathered once, and the gradient summed once, not for each
    chunk.
    """
    shape = hidden.shape
    graphdef, trained, frozen = nnx.split(model.lm_head, trainable_filter, ...)

    def project(trained: nnx.State, frozen: nnx.State, hidden: Array) -> Array:
        head = nnx.merge(graphdef, trained, frozen)
        head.scale, head.soft_cap = 1.0, None  # the operation scales and caps where it reads the logits anyway
        return lm_logits(head, hidden)

    parts = (batch_devices() * devices_along(TENSOR), devices_along(CONTEXT))
    if split_axis(shape[0]) == 1:
        parts = (batch_devices(), devices_along(CONTEXT) * devices_along(TENSOR))
    rows, length = -(-shape[0] // parts[0]), shape[1] // parts[1]
    options = {
        "chunk_size": chunk_size or chunk_size_for(rows, length, model.config.vocab_size),
        "logits_scale": model.lm_head.scale,
        "logits_soft_cap": model.lm_head.soft_cap,
    }
    arrays = nnx.to_pure_dict(frozen)
    if holds_shards() and "weight" in arrays:
        # Not before the layers have run: the whole table would lie there beside them.
        after = jax.lax.stop_gradient(hidden)
        arrays |= {"weight": gathered(arrays["weight"], [P("vocabulary", None)], after)}
    return project, nnx.to_pure_dict(trained), arrays, options
