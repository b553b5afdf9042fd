"""Log-probabilities of the documents in packed rows, under the model and under the reference; a reward model's scores.

The reference of an adapter is the model without it: a second pass over the same frozen arrays, in the same step, of
which nothing is kept for the backward pass. The adapter is there at scale zero, so that both passes round alike:
kernels that add an adapter's products as they go add in another order than products alone. Where training begins from
something else than the base, as an adapter that has been trained, the model holds that start (`models.start`), with
which the second pass is made. Where neither is there, or the reference is another model, its log-probabilities are
computed once and come with the rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.filterlib import Filter
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fastjax.errors import ConfigError
from fastjax.models.decoder import Decoder
from fastjax.models.projection import without_adapters
from fastjax.models.start import at_start
from fastjax.training.head import head_log_probs
from pallas_kernels.cross_entropy import IGNORE_INDEX


class Scores(NamedTuple):
    """Numbers of the documents of rows; 0 where there is none. D is the number of `rows.extra["roles"]` a row.

    Attributes:
        log_probs: sum over the document's target tokens, float32.
        lengths: their number, float32.
    """

    log_probs: Float[Array, "B D"]
    lengths: Float[Array, "B D"]

    @property
    def means(self) -> Float[Array, "B D"]:
        """Log-probability a token."""
        return self.log_probs / jnp.maximum(self.lengths, 1.0)


def document_scores(
    model: Decoder,
    trainable_filter: Filter,
    rows: Any,
    *,
    key: PRNGKeyArray | None = None,
    chunk_size: int | None = None,
) -> Scores:
    """The documents' log-probabilities under the model.

    Args:
        model: the decoder, merged.
        trainable_filter: the nnx filter of the trained variables.
        rows: a Batch without its accumulation axis, whose `extra` has `roles`, int32 [B, D], in the order of segments.
        key: dropout key; None: no dropout.
        chunk_size: sequence places whose logits exist at once on a device; None: by the size of the vocabulary.
    """
    log_probs = token_log_probs(model, trainable_filter, rows, rows.targets, key=key, chunk_size=chunk_size)
    return by_document(log_probs, rows.targets != IGNORE_INDEX, rows)


def token_log_probs(
    model: Decoder,
    trainable_filter: Filter,
    rows: Any,
    targets: Int[Array, "B S"],
    *,
    key: PRNGKeyArray | None = None,
    chunk_size: int | None = None,
) -> Float[Array, "B S"]:
    """The log-probability of each target, float32; 0 where there is none.

    Args:
        model: the decoder, merged.
        trainable_filter: the nnx filter of the trained variables.
        rows: as for `document_scores`.
        targets: the tokens that follow, IGNORE_INDEX where none is scored.
        key: as for `document_scores`.
        chunk_size: as for `document_scores`.
    """
    hidden = model.head_input(model.forward(rows.tokens, rows.positions, rows.segment_ids, key=key).hidden, key)
    return head_log_probs(model, trainable_filter, hidden, targets, chunk_size=chunk_size)


def all_targets(rows: Any) -> Int[Array, "B S"]:
    """The token that follows each in its document, scored or not; IGNORE_INDEX where none is known.

    Args:
        rows: as for `document_scores`.
    """
    following, segments = jnp.roll(rows.tokens, -1, axis=1), _segments(rows)
    inside = (jnp.roll(segments, -1, axis=1) == segments) & (segments > 0)
    inside = inside.at[:, -1].set(False)
    return jnp.where(rows.targets != IGNORE_INDEX, rows.targets, jnp.where(inside, following, IGNORE_INDEX))


def by_document(log_probs: Float[Array, "B S"], counted: Bool[Array, "B S"], rows: Any) -> Scores:
    """Sums over the documents of rows.

    Args:
        log_probs: of the targets.
        counted: which of them are added up.
        rows: as for `document_scores`.
    """
    inside = documents_of(rows) & counted[:, :, None]
    return Scores(
        jnp.sum(jnp.where(inside, log_probs[:, :, None], 0.0), axis=1), jnp.sum(inside, axis=1, dtype=log_probs.dtype)
    )


def documents_of(rows: Any) -> Bool[Array, "B S D"]:
    """Whether a token belongs to a document.

    Args:
        rows: as for `document_scores`.
    """
    segments = _segments(rows)
    slots = jnp.arange(1, rows.extra["roles"].shape[1] + 1, dtype=segments.dtype)
    return segments[:, :, None] == slots[None, None, :]


def document_rewards(model: Decoder, rows: Any, *, key: PRNGKeyArray | None = None) -> Float[Array, "B D"]:
    """The documents' scores under a reward model, each read at its last token, float32; 0 where there is none.

    Args:
        model: the decoder, merged, with a score in place of logits.
        rows: as for `document_scores`; a document's last token is the end of its answer.
        key: as for `document_scores`.

    Raises:
        ConfigError: a model with logits.
    """
    if not model.config.scored:
        raise ConfigError("model: expected one with a score in place of logits (with_score_head), got one with logits")
    scores = model.score(model.forward(rows.tokens, rows.positions, rows.segment_ids, key=key).hidden)
    inside, places = documents_of(rows), jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :, None]
    last = jnp.max(jnp.where(inside, places, -1), axis=1, keepdims=True)
    return jnp.sum(jnp.where(inside & (places == last), scores[:, :, None], 0.0), axis=1)


def _segments(rows: Any) -> Int[Array, "B S"]:
    return jnp.ones_like(rows.tokens) if rows.segment_ids is None else rows.segment_ids


def reference_log_probs(
    model: Decoder, trainable_filter: Filter, rows: Any, *, chunk_size: int | None = None
) -> Float[Array, "B D"]:
    """The documents' log-probabilities under the reference, a constant.

    Args:
        model: the decoder, merged.
        trainable_filter: the nnx filter of the trained variables.
        rows: as for `document_scores`. `extra["reference_log_probs"]`, float32 [B, D], are those of the reference;
            without them it is the model as it holds its start, or else without its adapters.
        chunk_size: as for `document_scores`.

    Raises:
        ConfigError: neither: weights are trained in the place of the reference's.
    """
    if "reference_log_probs" in rows.extra:
        return jax.lax.stop_gradient(rows.extra["reference_log_probs"])
    if (start := at_start(model, trainable_filter)) is not None:
        return document_scores(start, trainable_filter, rows, chunk_size=chunk_size).log_probs
    expected = "reference_log_probs: expected in the rows' extra fields, as the model without adapters is no reference"
    try:
        base = without_adapters(model)
    except ConfigError as error:
        raise ConfigError(f"{expected}: {error}") from error
    trained = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.split(base, trainable_filter, ...)[1]))
    if trained:
        names = ", ".join(jax.tree_util.keystr(path) for path, _ in trained[:3])
        raise ConfigError(f"{expected}: {len(trained)} of its arrays are trained, such as {names}; got none")
    graphdef, state = nnx.split(without_adapters(model, at_scale_zero=True))
    silent = nnx.merge(graphdef, jax.lax.stop_gradient(state))  # before the pass: what it would keep is not made
    return document_scores(silent, trainable_filter, rows, chunk_size=chunk_size).log_probs
