"""The loss of a batch: cross-entropy summed over target tokens, never the whole logits at once."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from flax.nnx.filterlib import Filter
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.models.decoder import Decoder
from fastjax.models.moe import load_of, router_statistics
from fastjax.training.head import head_cross_entropy
from pallas_kernels.moe_routing import load_balancing_loss, z_loss


class LossSums(NamedTuple):
    """Sums over the rows of a microbatch, added up over microbatches and devices.

    Attributes:
        loss_sum: the numerator of the loss.
        weight: the denominator, at least 0; None: the metric num_targets, the number of the rows' target tokens.
        metrics: by name. `num_targets` and `num_correct` are counts of tokens and make the token accuracy; the mean of
            any other, over the weight or over its own (`Mean`), is reported under its name.
    """

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""] | Int[Array, ""] | None
    metrics: Mapping[str, "Array | Mean"]


class Mean(NamedTuple):
    """A metric with a weight of its own; reported as NaN where this is zero.

    Attributes:
        total: the sum.
        weight: at least 0.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]


class Loss(Protocol):
    """The loss of one microbatch: `loss_sums`, or a function of your own.

    A step's loss is the sum of `loss_sum` over the sum of `weight`, both over all microbatches and devices, so
    accumulation and data parallelism do not change it. No gradient flows through the weight.
    """

    def __call__(self, model: Decoder, trainable_filter: Filter, rows: Any, /, *, key: PRNGKeyArray | None) -> LossSums:
        """The sums over a microbatch.

        Args:
            model: the decoder, merged.
            trainable_filter: the nnx filter of the trained variables.
            rows: a Batch without its accumulation axis, int32 [B, S]; its `extra` fields [B, …].
            key: dropout key; None in an evaluation.
        """
        ...


def loss_sums(
    model: Decoder,
    trainable_filter: Filter,
    rows: Any,
    *,
    key: PRNGKeyArray | None,
    chunk_size: int | None = None,
    label_smoothing_factor: float = 0.0,
    z_loss_coef: float = 0.0,
    neftune_noise_alpha: float | None = None,
    router_aux_loss_coef: float = 0.0,
    router_z_loss_coef: float = 0.0,
) -> LossSums:
    """Forward pass and cross-entropy of one microbatch.

    Args:
        model: the decoder, merged.
        trainable_filter: the nnx filter of the trained variables.
        rows: a Batch without its accumulation axis, int32 [B, S]: tokens, targets (-100 where nothing is learnt),
            segment_ids (or None: every row is one document) and positions.
        key: dropout key; None in an evaluation.
        chunk_size: sequence places whose logits exist at once on a device; None: by the size of the vocabulary.
        label_smoothing_factor: share of the loss that is the mean of −log p over the vocabulary where there is a key.
        z_loss_coef: factor of the square of the logits' logsumexp, which is added where there is a key.
        neftune_noise_alpha: magnitude of the noise on the embeddings where there is a key; None: none.
        router_aux_loss_coef: factor of the routers' load-balancing loss where there is a key.
        router_z_loss_coef: factor of the loss of the routers' logits where there is a key.

    Returns:
        The sums, whose weight is the number of target tokens, with the metrics num_targets and num_correct; where the
        loss is more than the cross-entropy, this alone as cross_entropy, and z_loss, without its factor; and of
        mixtures of experts router_largest_share, router_entropy (`router_statistics`) and
        router_load_balancing_loss. The routers' losses, means over a microbatch's tokens, are added with that weight.
    """
    options = {"key": key, "neftune_noise_alpha": neftune_noise_alpha}
    forward = model.forward(rows.tokens, rows.positions, rows.segment_ids, **options)
    hidden = model.head_input(forward.hidden, key)
    smoothing, coefficient = (0.0, 0.0) if key is None else (label_smoothing_factor, z_loss_coef)
    terms = {"label_smoothing": smoothing, "z_loss": coefficient}
    sums = head_cross_entropy(model, trainable_filter, hidden, rows.targets, chunk_size=chunk_size, **terms)
    loss_sum, num_targets = sums.loss_sum, sums.num_targets
    metrics = {"num_targets": num_targets, "num_correct": sums.num_correct}
    if smoothing or coefficient:
        metrics |= {"cross_entropy": sums.cross_entropy_sum, "z_loss": sums.z_loss_sum}
    if not forward.sums:
        return LossSums(loss_sum, None, metrics)
    load, weight = load_of(forward.sums), num_targets.astype(jnp.float32)
    balance = load_balancing_loss(load)
    if key is not None:
        loss_sum = loss_sum + weight * (router_aux_loss_coef * balance + router_z_loss_coef * z_loss(load))
    routers = router_statistics(forward.sums) | {"router_load_balancing_loss": balance}
    return LossSums(loss_sum, None, metrics | {name: weight * value for name, value in routers.items()})
