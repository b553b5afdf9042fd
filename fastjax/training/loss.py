"""The loss of a batch: cross-entropy summed over target tokens, never the whole logits at once."""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.models.decoder import Decoder, lm_logits
from fastjax.parallel import batch_devices
from pallas_kernels.cross_entropy import chunk_size_for, chunked_cross_entropy


class LossSums(NamedTuple):
    """Sums over the target tokens of a batch; the mean loss is loss_sum / num_targets."""

    loss_sum: Float[Array, ""]
    num_targets: Int[Array, ""]
    num_correct: Int[Array, ""]


def loss_sums(
    model: Decoder,
    trainable: Any,
    tokens: Int[Array, "B S"],
    targets: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"] | None,
    *,
    key: PRNGKeyArray | None,
    chunk_size: int | None = None,
) -> LossSums:
    """Forward pass and cross-entropy of one microbatch.

    Args:
        model: the decoder, merged.
        trainable: the nnx filter that says which variables are trained.
        tokens: token ids.
        targets: the next token at every place, -100 where it does not count.
        positions: place of each token in its document.
        segment_ids: document of each token, 0 for padding; None: every row is one document.
        key: dropout key, or None.
        chunk_size: sequence places whose logits exist at once; None: by the size of the vocabulary.
    """
    hidden = model.head_input(model(tokens, positions, segment_ids, key=key), key)
    graphdef, trained, frozen = nnx.split(model.lm_head, trainable, ...)

    def project(trained: Any, frozen: Any, hidden: Array) -> Array:
        return lm_logits(nnx.merge(graphdef, trained, frozen), hidden)

    rows = -(-tokens.shape[0] // batch_devices())
    size = chunk_size or chunk_size_for(rows, tokens.shape[1], model.config.vocab_size)
    sums = chunked_cross_entropy(
        project, nnx.to_pure_dict(trained), nnx.to_pure_dict(frozen), hidden, targets, chunk_size=size
    )
    return LossSums(*(jax.numpy.asarray(value) for value in sums))
