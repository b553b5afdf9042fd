"""The papers' equations: log-probabilities of answers in, the loss of each pair or answer out.

π is the policy, π₀ the reference, y₊ and y₋ the chosen and the rejected answer of a prompt x, σ the logistic function.
Arguments are float32 of one shape. Nothing is averaged, and no gradient is stopped: a caller that differentiates passes
the reference as a constant.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def dpo(log_ratio: Float[Array, "*P"], *, beta: float, label_smoothing: float = 0.0) -> Float[Array, "*P"]:
    """DPO (arXiv 2305.18290, equation 7), conservative where labels are smoothed (cDPO).

        h = log(π(y₊)/π₀(y₊)) − log(π(y₋)/π₀(y₋));   −(1 − ε)·log σ(β·h) − ε·log σ(−β·h)

    Args:
        log_ratio: h, of sums over the answers' tokens.
        beta: β.
        label_smoothing: ε, the probability that a label is wrong, in [0, 0.5).
    """
    return _smoothed(beta * log_ratio, label_smoothing)


def ipo(log_ratio: Float[Array, "*P"], *, beta: float) -> Float[Array, "*P"]:
    """IPO (arXiv 2310.12036, equation 17): (h − 1/(2τ))².

    Args:
        log_ratio: h as for `dpo`, of means over the answers' tokens: the published results are of means, and so is
            TRL's loss.
        beta: τ.
    """
    return jnp.square(log_ratio - 1.0 / (2.0 * beta))


def kto(
    policy: Float[Array, "*P"],
    reference: Float[Array, "*P"],
    desirable: Bool[Array, "*P"],
    divergence: Float[Array, ""],
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, "*P"]:
    """KTO (arXiv 2402.01306, equation 8), with r = log(π(y)/π₀(y)):

        λ₊·(1 − σ(β·(r − z)))   of a desirable answer,   λ₋·(1 − σ(β·(z − r)))   of an undesirable one

    Args:
        policy: Σ log π of the answer's tokens.
        reference: Σ log π₀.
        desirable: which answers are.
        divergence: z, `kto_divergence`.
        beta: β.
        desirable_weight: λ₊.
        undesirable_weight: λ₋.
    """
    margin = beta * (policy - reference - divergence)
    return jnp.where(desirable, desirable_weight * jax.nn.sigmoid(-margin), undesirable_weight * jax.nn.sigmoid(margin))


def kto_divergence(
    policy: Float[Array, "*P"], reference: Float[Array, "*P"], mismatched: Bool[Array, "*P"]
) -> Float[Array, ""]:
    """KTO's estimate of the policy's divergence from the reference: max(0, mean of log(π/π₀)); a constant.

    Args:
        policy: Σ log π of a completion's tokens behind a prompt that is not its own.
        reference: Σ log π₀.
        mismatched: which of the documents are such; NaN where none is.
    """
    total = jnp.sum(jnp.where(mismatched, policy - reference, 0.0))
    mean = total / jnp.sum(mismatched, dtype=policy.dtype)
    return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))


def odds_ratio(
    policy_chosen: Float[Array, "*P"], policy_rejected: Float[Array, "*P"], *, beta: float
) -> Float[Array, "*P"]:
    """ORPO's second term (arXiv 2403.07691, equation 6), with odds(p) = p / (1 − p); the first is −log p(y₊):

        −λ·log σ(log(odds(p(y₊)) / odds(p(y₋)))),   log p(y) = mean of log π over y's tokens

    Args:
        policy_chosen: log p of the chosen answer, below 0.
        policy_rejected: that of the rejected one.
        beta: λ.
    """
    return -beta * jax.nn.log_sigmoid(log_odds(policy_chosen) - log_odds(policy_rejected))


def log_odds(log_prob: Float[Array, "*P"]) -> Float[Array, "*P"]:
    """log(p / (1 − p)) of log p, below 0."""
    return log_prob - jax.nn.log1mexp(-log_prob)


def simpo(
    policy_chosen: Float[Array, "*P"],
    policy_rejected: Float[Array, "*P"],
    *,
    beta: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Float[Array, "*P"]:
    """SimPO (arXiv 2405.14734, equation 6): −log σ(β·log p(y₊) − β·log p(y₋) − γ), log p as for `odds_ratio`.

    Args:
        policy_chosen: log p of the chosen answer.
        policy_rejected: log p of the rejected answer.
        beta: β.
        gamma: γ, the margin.
        label_smoothing: as for `dpo`.
    """
    return _smoothed(beta * (policy_chosen - policy_rejected) - gamma, label_smoothing)


def bradley_terry(
    chosen: Float[Array, "*P"],
    rejected: Float[Array, "*P"],
    margin: Float[Array, "*P"],
    *,
    center_rewards_coefficient: float = 0.0,
) -> Float[Array, "*P"]:
    """A reward model's loss (Ouyang et al., arXiv 2203.02155, equation 1), with a margin (Llama 2, arXiv 2307.09288,
    equation 2), and rewards held near a mean of zero (Eisenstein et al., arXiv 2312.09244):

        −log σ(r(x, y₊) − r(x, y₋) − m) + c·(r(x, y₊) + r(x, y₋))²

    Args:
        chosen: r of the chosen answer.
        rejected: r of the rejected one.
        margin: m.
        center_rewards_coefficient: c.
    """
    loss = -jax.nn.log_sigmoid(chosen - rejected - margin)
    return loss + center_rewards_coefficient * jnp.square(chosen + rejected) if center_rewards_coefficient else loss


def _smoothed(logits: Float[Array, "*P"], label_smoothing: float) -> Float[Array, "*P"]:
    """Binary cross-entropy of logits whose label is one, but with a probability of `label_smoothing`."""
    right = -jax.nn.log_sigmoid(logits)
    if not label_smoothing:
        return right
    return (1.0 - label_smoothing) * right - label_smoothing * jax.nn.log_sigmoid(-logits)
