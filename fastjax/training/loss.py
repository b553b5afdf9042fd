"""The loss of a batch: cross-entropy summed over target tokens, never the whole logits at once."""

from typing import Any, NamedTuple, Protocol

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


class Loss(Protocol):
    """The loss of one microbatch: `loss_sums`, or a function of your own."""

    def __call__(self, model: Decoder, trainable: Any, rows: Any, *, key: PRNGKeyArray | None) -> LossSums:
        """The sums over the rows' target tokens; `loss_sum` is divided by the step's number of targets."""
        ...


def loss_sums(
    model: Decoder,
    trainable: Any,
    rows: Any,
    *,
    key: PRNGKeyArray | None,
    chunk_size: int | None = None,
    neftune_noise_alpha: float | None = None,
) -> LossSums:
    """Forward pass and cross-entropy of one microbatch.

    Args:
        model: the decoder, merged.
        trainable: the nnx filter that says which variables are trained.
        rows: a Batch without its accumulation axis, int32 [B, S]: tokens, targets (-100 where nothing is learnt),
            segment_ids (or None: every row is one document) and positions.
        key: dropout key; None in an evaluation.
        chunk_size: sequence places whose logits exist at once; None: by the size of the vocabulary.
        neftune_noise_alpha: magnitude of the noise on the embeddings where there is a key; None: none.
    """
    hidden = model.head_input(
        model(rows.tokens, rows.positions, rows.segment_ids, key=key, neftune_noise_alpha=neftune_noise_alpha), key
    )
    graphdef, trained, frozen = nnx.split(model.lm_head, trainable, ...)

    def project(trained: Any, frozen: Any, hidden: Array) -> Array:
        return lm_logits(nnx.merge(graphdef, trained, frozen), hidden)

    local_rows = -(-rows.tokens.shape[0] // batch_devices())
    size = chunk_size or chunk_size_for(local_rows, rows.tokens.shape[1], model.config.vocab_size)
    sums = chunked_cross_entropy(
        project, nnx.to_pure_dict(trained), nnx.to_pure_dict(frozen), hidden, rows.targets, chunk_size=size
    )
    return LossSums(*(jax.numpy.asarray(value) for value in sums))
