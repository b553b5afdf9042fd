"""The objectives as losses of the train step.

A loss is a sum over the pairs, or for KTO over the answers, whose number is its weight: the rows' division into
microbatches and devices does not change it, but for KTO's divergence and ORPO's mean over all tokens, both of each
microbatch. Defaults are TRL's, but SimPO's (β 2, γ 1; there 0.1, γ 0.5) and ORPO's nll_tokens (there "all").

Metrics, as in TRL: rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies, logps/chosen, logps/rejected,
with rewards β·log(π/π₀), or β·(mean of log π) without a reference; of ORPO nll_loss and log_odds_ratio, of KTO kl; of
a reward model its scores, with their mean rewards/mean, and no log-probabilities.
Routers' losses and label smoothing over the vocabulary are not added.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval
from flax.nnx.filterlib import Filter
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fastjax.data.preferences import Role
from fastjax.models.decoder import Decoder
from fastjax.options import checked
from fastjax.options.kinds import NotNegative, Positive
from fastjax.training.loss import LossSums, Mean
from fastjax.training.preferences import objectives
from fastjax.training.preferences.scores import (
    all_targets,
    by_document,
    document_rewards,
    document_scores,
    reference_log_probs,
    token_log_probs,
)
from pallas_kernels.cross_entropy import IGNORE_INDEX


class Pairs(NamedTuple):
    """The pairs of rows, at the place of their chosen document.

    Attributes:
        present: where there is one.
        whole: whether every chosen or rejected document is in one; bool [].
    """

    present: Bool[Array, "B P"]
    whole: Bool[Array, ""]

    def of(self, values: Float[Array, "B D"]) -> tuple[Float[Array, "B P"], Float[Array, "B P"]]:
        """The documents' numbers, of the chosen and of the rejected; without a pair −1, whose odds are finite."""
        return jnp.where(self.present, values[:, :-1], -1.0), jnp.where(self.present, values[:, 1:], -1.0)

    def sums(
        self, losses: Float[Array, "B P"], chosen: Float[Array, "B P"], rejected: Float[Array, "B P"], **means: Array
    ) -> LossSums:
        """The sums over the pairs; a loss of NaN where a chosen or rejected document has no partner.

        Args:
            losses: of each pair.
            chosen: the rewards of the chosen documents.
            rejected: those of the rejected ones.
            means: further numbers of each pair.
        """
        means |= {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).astype(losses.dtype),
        }
        metrics = {name: self.total(jax.lax.stop_gradient(value)) for name, value in means.items()}
        loss_sum = jnp.where(self.whole, self.total(losses), jnp.nan)
        return LossSums(loss_sum, jnp.sum(self.present, dtype=losses.dtype), metrics)

    def total(self, values: Float[Array, "B P"]) -> Float[Array, ""]:
        """The sum over the pairs."""
        return jnp.sum(jnp.where(self.present, values, 0.0))


def pairs_of(roles: Array) -> Pairs:
    """The pairs among documents: a chosen one and the rejected one right behind it.

    Args:
        roles: `Role`s, int32 [B, D].
    """
    chosen, rejected = roles == Role.CHOSEN, roles == Role.REJECTED
    present = chosen[:, :-1] & rejected[:, 1:]
    count = jnp.sum(present)
    return Pairs(present, (jnp.sum(chosen) == count) & (jnp.sum(rejected) == count))


@checked("DPOLoss")
class DPOLoss:
    """`objectives.dpo` over pairs.

    Attributes:
        beta: strength of the tie to the reference.
        label_smoothing: probability that a pair's label is wrong (cDPO).
        chunk_size: sequence places whose logits exist at once on a device; None: by the size of the vocabulary.
    """

    beta: Positive = 0.1
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    chunk_size: int | None = None

    def __call__(self, model: Decoder, trainable_filter: Filter, rows: Any, /, *, key: PRNGKeyArray | None) -> LossSums:
        """The sums over a microbatch; see `training.loss.Loss`."""
        policy = document_scores(model, trainable_filter, rows, key=key, chunk_size=self.chunk_size)
        reference = reference_log_probs(model, trainable_filter, rows, chunk_size=self.chunk_size)
        pairs = pairs_of(rows.extra["roles"])
        chosen, rejected = pairs.of(policy.log_probs)
        base_chosen, base_rejected = pairs.of(reference)
        log_ratio = (chosen - rejected) - (base_chosen - base_rejected)
        losses = objectives.dpo(log_ratio, beta=self.beta, label_smoothing=self.label_smoothing)
        rewards = self.beta * (chosen - base_chosen), self.beta * (rejected - base_rejected)
        return pairs.sums(losses, *rewards, **_log_probs(chosen, rejected))


@checked("IPOLoss")
class IPOLoss:
    """`objectives.ipo` over pairs, of mean log-probabilities.

    Attributes:
        beta: strength of the tie to the reference (τ).
        chunk_size: as of `DPOLoss`.
    """

    beta: Positive = 0.1
    chunk_size: int | None = None

    def __call__(self, model: Decoder, trainable_filter: Filter, rows: Any, /, *, key: PRNGKeyArray | None) -> LossSums:
        """The sums over a microbatch; see `training.loss.Loss`."""
        policy = document_scores(model, trainable_filter, rows, key=key, chunk_size=self.chunk_size)
        reference = reference_log_probs(model, trainable_filter, rows, chunk_size=self.chunk_size)
        pairs = pairs_of(rows.extra["roles"])
        base = policy._replace(log_probs=reference)
        chosen, rejected = pairs.of(policy.means)
        base_chosen, base_rejected = pairs.of(base.means)
        losses = objectives.ipo((chosen - rejected) - (base_chosen - base_rejected), beta=self.beta)
        ratios = pairs.of(self.beta * (policy.log_probs - reference))
        return pairs.sums(losses, *ratios, **_log_probs(*pairs.of(policy.log_probs)))


@checked("ORPOLoss")
class ORPOLoss:
    """ORPO over pairs: the chosen answer's cross-entropy a token and `objectives.odds_ratio`, without a reference.

    Attributes:
        beta: factor of the odds ratio's term (λ).
        nll_tokens: those of the first term: "answer", of each pair the mean over the chosen answer's tokens, as in the
            paper's equation; or "all", the mean over all tokens of a microbatch's chosen documents, prompts included,
            as in TRL.
        chunk_size: as of `DPOLoss`.
    """

    beta: Positive = 0.1
    nll_tokens: Literal["answer", "all"] = "answer"
    chunk_size: int | None = None

    def __call__(self, model: Decoder, trainable_filter: Filter, rows: Any, /, *, key: PRNGKeyArray | None) -> LossSums:
        """The sums over a microbatch; see `training.loss.Loss`."""
        targets = all_targets(rows) if self.nll_tokens == "all" else rows.targets
        options = {"key": key, "chunk_size": self.chunk_size}
        log_probs = token_log_probs(model, trainable_filter, rows, targets, **options)
        pairs = pairs_of(rows.extra["roles"])
        chosen, rejected = pairs.of(by_document(log_probs, rows.targets != IGNORE_INDEX, rows).means)
        nll = -chosen
        if self.nll_tokens == "all":
            whole = by_document(log_probs, targets != IGNORE_INDEX, rows)
            is_chosen = rows.extra["roles"] == Role.CHOSEN
            count = jnp.sum(jnp.where(is_chosen, whole.lengths, 0.0))
            mean = jnp.sum(jnp.where(is_chosen, whole.log_probs, 0.0)) / jnp.maximum(count, 1.0)
            nll = jnp.broadcast_to(-mean, chosen.shape)
        losses = nll + objectives.odds_ratio(chosen, rejected, beta=self.beta)
        metrics = {"nll_loss": nll, "log_odds_ratio": objectives.log_odds(chosen) - objectives.log_odds(rejected)}
        return pairs.sums(losses, self.beta * chosen, self.beta * rejected, **metrics, **_log_probs(chosen, rejected))


@checked("SimPOLoss")
class SimPOLoss:
    """`objectives.simpo` over pairs, without a reference.

    Attributes:
        beta: factor of the mean log-probabilities.
        gamma: margin by which the chosen answer's reward should be larger.
        label_smoothing: probability that a pair's label is wrong.
        chunk_size: as of `DPOLoss`.
    """

    beta: Positive = 2.0
    gamma: float = 1.0
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    chunk_size: int | None = None

    def __call__(self, model: Decoder, trainable_filter: Filter, rows: Any, /, *, key: PRNGKeyArray | None) -> LossSums:
        """The sums over a microbatch; see `training.loss.Loss`."""
        policy = document_scores(model, trainable_filter, rows, key=key, chunk_size=self.chunk_size)
        pairs = pairs_of(rows.extra["roles"])
        chosen, rejected = pairs.of(policy.means)
        options = {"beta": self.beta, "gamma": self.gamma, "label_smoothing": self.label_smoothing}
        losses = objectives.simpo(chosen, rejected, **options)
        return pairs.sums(losses, self.beta * chosen, self.beta * rejected, **_log_probs(chosen, rejected))


@checked("KTOLoss")
class KTOLoss:
    """`objectives.kto` over single answers; a microbatch with answers needs a mismatched document, or it gives NaN.

    Mismatched documents share the rows, and so the pass, with the answers; no gradient comes from them.

    Attributes:
        beta: strength of the tie to the reference.
        desirable_weight: factor of desirable answers' losses.
        undesirable_weight: of undesirable ones'.
        chunk_size: as of `DPOLoss`.
    """

    beta: Positive = 0.1
    desirable_weight: Positive = 1.0
    undesirable_weight: Positive = 1.0
    chunk_size: int | None = None

    def __call__(self, model: Decoder, trainable_filter: Filter, rows: Any, /, *, key: PRNGKeyArray | None) -> LossSums:
        """The sums over a microbatch; see `training.loss.Loss`."""
        policy = document_scores(model, trainable_filter, rows, key=key, chunk_size=self.chunk_size).log_probs
        reference = reference_log_probs(model, trainable_filter, rows, chunk_size=self.chunk_size)
        roles = rows.extra["roles"]
        desirable, undesirable = roles == Role.CHOSEN, roles == Role.REJECTED
        divergence = objectives.kto_divergence(policy, reference, roles == Role.MISMATCHED)
        answers = desirable | undesirable
        weight = jnp.sum(answers, dtype=policy.dtype)
        divergence = jnp.where(weight > 0, divergence, 0.0)
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        losses = objectives.kto(policy, reference, desirable, divergence, beta=self.beta, **weights)
        metrics: dict[str, Array | Mean] = {"kl": weight * divergence}
        for name, mask in (("chosen", desirable), ("rejected", undesirable)):
            count = jnp.sum(mask, dtype=policy.dtype)
            for kind, values in (("rewards", self.beta * (policy - reference)), ("logps", policy)):
                metrics[f"{kind}/{name}"] = Mean(jnp.sum(jax.lax.stop_gradient(jnp.where(mask, values, 0.0))), count)
        return LossSums(jnp.sum(jnp.where(answers, losses, 0.0)), weight, metrics)


@checked("RewardLoss")
class RewardLoss:
    """`objectives.bradley_terry` over pairs, of a reward model's scores.

    Rows come with the last token of each answer (`pack_preferences` with `last_token`), where its score is read, and
    with `extra["margins"]`, float32 [B, D], at the chosen documents, or without them.

    Attributes:
        center_rewards_coefficient: factor of the square of the two scores' sum.
    """

    center_rewards_coefficient: NotNegative = 0.0

    def __call__(self, model: Decoder, trainable_filter: Filter, rows: Any, /, *, key: PRNGKeyArray | None) -> LossSums:
        """The sums over a microbatch; see `training.loss.Loss`."""
        rewards = document_rewards(model, rows, key=key)
        pairs = pairs_of(rows.extra["roles"])
        chosen, rejected = pairs.of(rewards)
        margins = rows.extra["margins"][:, :-1] if "margins" in rows.extra else jnp.zeros_like(chosen)
        centred = {"center_rewards_coefficient": self.center_rewards_coefficient}
        losses = objectives.bradley_terry(chosen, rejected, margins, **centred)
        return pairs.sums(losses, chosen, rejected, **{"rewards/mean": (chosen + rejected) / 2})


def _log_probs(chosen: Array, rejected: Array) -> Mapping[str, Array]:
    return {"logps/chosen": chosen, "logps/rejected": rejected}
