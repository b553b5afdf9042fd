"""Routing of tokens to experts in plain JAX: static shapes, no synchronisation with the host, bitwise deterministic.

One stable sort brings the M = N·k chosen pairs into the order of their experts. Its inverse permutation turns every
scatter of a gradient into a gather: a token's k rows are read where they lie and summed (SonicMoE, arXiv 2512.14080).
A router is data (`RouterSettings`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.schedule import ZEROS_BEHIND
from pallas_kernels.transformations import custom_vjp, with_automatic_axes


class RouterSettings(NamedTuple):
    """The mathematics of a router.

    Attributes:
        experts_per_token: k.
        score: "softmax" over the experts, or "sigmoid" of each.
        score_after: the k largest logits are chosen, then scored among themselves.
        normalize: whether a token's k weights are divided by their sum.
        scale: factor of the weights.
        groups: number of groups of neighbouring experts; a group's score is the sum of its two best experts'.
        groups_per_token: number of the best groups whose experts can be chosen.
    """

    experts_per_token: int
    score: str = "softmax"
    score_after: bool = False
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        weights: factors of the experts' outputs; differentiable in the logits.
        experts: the chosen experts, the best first; of equal ones the lower number.
        logits: of all experts.
    """

    weights: Float[Array, "N k"]
    experts: Int[Array, "N k"]
    logits: Float[Array, "N X"]


class Order(NamedTuple):
    """The M = N·k pairs of token and expert in the order of the experts.

    Attributes:
        rows: token of each sorted pair, int32.
        order: its number before sorting, token by token, int32.
        inverse: place of each token's pairs among the sorted ones, int32.
        group_sizes: pairs of each expert, int32.
    """

    rows: Int[Array, " M"]
    order: Int[Array, " M"]
    inverse: Int[Array, "N k"]
    group_sizes: Int[Array, " X"]


class Load(NamedTuple):
    """Sums over the tokens of one layer or, added up, of several.

    Attributes:
        chosen: tokens of each expert.
        probabilities: softmax of the logits.
        squared_logsumexp: square of the logits' logsumexp.
        tokens: number of tokens.
    """

    chosen: Float[Array, " X"]
    probabilities: Float[Array, " X"]
    squared_logsumexp: Float[Array, ""]
    tokens: Float[Array, ""]


def route(
    logits: Float[Array, "N X"], settings: RouterSettings, choice_bias: Float[Array, " X"] | None = None
) -> Routing:
    """Choose each token's experts and weigh them, in the dtype of the logits.

    Args:
        logits: of all experts; float32, since 16 bits make ties.
        settings: the router's.
        choice_bias: added to the scores for the choice alone (arXiv 2408.15664).

    Raises:
        ValueError: settings that the number of experts does not allow.
    """
    count = logits.shape[1]
    _check(settings, count)
    scores = logits if settings.score_after else _score(logits, settings.score)
    choice = jax.lax.stop_gradient(scores)
    if choice_bias is not None:
        choice = choice + jax.lax.stop_gradient(choice_bias).astype(choice.dtype)[None, :]
    if settings.groups_per_token < settings.groups:
        choice = jnp.where(_in_best_groups(choice, settings), choice, -jnp.inf)
    experts = jax.lax.top_k(choice, settings.experts_per_token)[1].astype(jnp.int32)
    weights = _chosen(scores, experts)
    if settings.score_after:
        weights = _score(weights, settings.score)
    if settings.normalize:
        # A sum of sigmoids can be zero; as in DeepSeek's models.
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return Routing(weights * settings.scale, experts, logits)


def sort_by_expert(experts: Int[Array, "N k"], num_experts: int, absent: bool = False) -> Order:
    """Sort the pairs of token and expert by expert; an expert's tokens stay in their order.

    Args:
        experts: of each token.
        num_experts: X.
        absent: whether a token may have pairs without an expert, whose number is X. They are sorted to the end, where
            products over groups make the first `ZEROS_BEHIND` rows zeros; `inverse` points such a pair to one of
            these: few enough for a cache, and enough for all of its banks.
    """
    return with_automatic_axes(
        lambda experts: _sorted(experts, num_experts, absent),
        experts,
        rows_like=Order(experts, experts, experts, None),  # pyright: ignore[reportArgumentType]
    )


def _sorted(experts: Array, num_experts: int, absent: bool) -> Order:
    flat = experts.reshape(-1).astype(jnp.int32)
    numbers = jnp.arange(flat.size, dtype=jnp.int32)
    _, order = jax.lax.sort((flat, numbers), num_keys=1, is_stable=True)
    inverse = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.int32)
    if absent:
        behind = inverse - jnp.sum(sizes)
        inverse = jnp.where(behind < 0, inverse, inverse - behind + behind % ZEROS_BEHIND)
    return Order(order // experts.shape[1], order, inverse.reshape(experts.shape), sizes)


@custom_vjp
def combine(y: Float[Array, "M E"], weights: Float[Array, "N k"], order: Order) -> Float[Array, "N E"]:
    """Each token's sum of its experts' outputs, accumulated in float32.

    Args:
        y: the experts' outputs in sorted order.
        weights: of each token's experts.
        order: from `sort_by_expert`.

    Returns:
        The sums in the dtype of y. Differentiable in y and the weights.
    """
    return with_automatic_axes(_sums, y, weights, order, rows_like=weights)


def _sums(y: Array, weights: Array, order: Order) -> Array:
    # A sum and no matrix product, which XLA would not fuse with the gather.
    chosen = y[order.inverse].astype(jnp.float32) * weights.astype(jnp.float32)[:, :, None]
    return jnp.sum(chosen, axis=1).astype(y.dtype)


def _combine_forward(y, weights, order: Order):
    return combine(y, weights, order), (y, weights, order)


def _combine_backward(residuals, dout):
    dy, dweights = with_automatic_axes(_sums_gradients, *residuals, dout, rows_like=(residuals[0], residuals[1]))
    return dy, dweights, None


def _sums_gradients(y: Array, weights: Array, order: Order, dout: Array) -> tuple[Array, Array]:
    dy = dout[order.rows].astype(jnp.float32) * weights.reshape(-1)[order.order].astype(jnp.float32)[:, None]
    dweights = jnp.sum(y[order.inverse].astype(jnp.float32) * dout.astype(jnp.float32)[:, None, :], axis=2)
    return dy.astype(y.dtype), dweights.astype(weights.dtype)


combine.defvjp(_combine_forward, _combine_backward)


def measure_load(routing: Routing, mask: Bool[Array, " N"] | None = None) -> Load:
    """The load of a layer's experts; differentiable in the logits.

    Args:
        routing: of the layer.
        mask: which tokens count, the others being padding; None: all.
    """
    logits, (count, experts) = routing.logits, routing.logits.shape
    counted = jnp.ones((count,), logits.dtype) if mask is None else mask.astype(logits.dtype)
    chosen = (routing.experts[:, :, None] == jnp.arange(experts, dtype=jnp.int32)[None, None, :]).astype(logits.dtype)
    sums = jax.nn.logsumexp(logits, axis=1)
    return Load(
        jnp.sum(chosen * counted[:, None, None], axis=(0, 1)),
        jnp.sum(jax.nn.softmax(logits, axis=1) * counted[:, None], axis=0),
        jnp.sum(jnp.square(sums) * counted),
        jnp.sum(counted),
    )


def load_balancing_loss(load: Load) -> Float[Array, ""]:
    """X·Σₓ fₓ·Pₓ: the share of the tokens that choose an expert times its mean probability.

    It is k where the load is even. References: Switch Transformers, arXiv 2101.03961, eq. 4-6, with f over all k
    choices as in transformers.

    Args:
        load: of all layers together.
    """
    tokens = jnp.maximum(load.tokens, 1)
    return load.chosen.shape[0] * jnp.sum(load.chosen * load.probabilities) / tokens**2


def z_loss(load: Load) -> Float[Array, ""]:
    """The mean square of the logits' logsumexp, which keeps logits small (ST-MoE, arXiv 2202.08906, eq. 5).

    Args:
        load: of all layers together.
    """
    return load.squared_logsumexp / jnp.maximum(load.tokens, 1)


def _check(settings: RouterSettings, experts: int) -> None:
    chosen, groups, best = settings.experts_per_token, settings.groups, settings.groups_per_token
    if settings.score not in ("softmax", "sigmoid"):
        raise ValueError(f"route: score: expected 'softmax' or 'sigmoid', got {settings.score!r}")
    if experts % groups or not 1 <= best <= groups:
        raise ValueError(
            f"route: groups: expected a divisor of the {experts} experts and groups_per_token among them, got {groups} "
            f"groups, {best} a token"
        )
    if not 1 <= chosen <= experts // groups * best:
        raise ValueError(
            f"route: experts_per_token: expected 1 to {experts // groups * best}, the experts of {best} groups, got "
            f"{chosen}"
        )


def _score(logits: Float[Array, "N n"], score: str) -> Float[Array, "N n"]:
    return jax.nn.softmax(logits, axis=1) if score == "softmax" else jax.nn.sigmoid(logits)


def _in_best_groups(choice: Float[Array, "N X"], settings: RouterSettings) -> Bool[Array, "N X"]:
    """Which experts are in a token's best groups."""
    count, experts = choice.shape
    size = experts // settings.groups
    best = jax.lax.top_k(choice.reshape(count, settings.groups, size), min(2, size))[0]
    chosen = jax.lax.top_k(jnp.sum(best, axis=-1), settings.groups_per_token)[1]
    of_expert = jnp.arange(experts, dtype=chosen.dtype) // size
    return jnp.any(chosen[:, :, None] == of_expert[None, None, :], axis=1)


@custom_vjp
def _chosen(scores: Float[Array, "N X"], experts: Int[Array, "N k"]) -> Float[Array, "N k"]:
    """The scores of the chosen experts; the gradient is a sum over k comparisons instead of a scatter."""
    return jnp.take_along_axis(scores, experts, axis=1)


def _chosen_forward(scores, experts):
    return _chosen(scores, experts), (experts, scores.shape[1])


def _chosen_backward(residuals, dchosen):
    experts, count = residuals
    here = experts[:, :, None] == jnp.arange(count, dtype=experts.dtype)[None, None, :]
    return jnp.sum(jnp.where(here, dchosen[:, :, None], 0), axis=1), None


_chosen.defvjp(_chosen_forward, _chosen_backward)
