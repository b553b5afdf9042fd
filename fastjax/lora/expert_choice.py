"""The choice of each token's experts as a differentiable unit: of few tokens that are not differentiated one kernel."""

import jax
from jaxtyping import Array, Float

from fastjax.lora.units import unit
from pallas_kernels import few_experts
from pallas_kernels.moe_routing import RouterSettings, Routing, route


def choose_experts(
    settings: RouterSettings, logits: Float[Array, "N X"], choice_bias: Float[Array, " X"] | None
) -> tuple[Routing, few_experts.Items | None]:
    """The routing, differentiable in the logits, and its items where the kernel for a few tokens serves.

    Args:
        settings: the router's.
        logits: of all experts, float32.
        choice_bias: added to the scores for the choice alone; frozen.
    """
    if few_experts.why_not_route(logits, settings) is not None:
        return route(logits, settings, choice_bias), None
    return _unit(settings, logits, choice_bias)


def _forward(settings: RouterSettings, logits, choice_bias):
    def weights_of(logits):
        routing = route(logits, settings, choice_bias)
        return routing.weights, routing.experts

    weights, pullback, experts = jax.vjp(weights_of, logits, has_aux=True)
    items = few_experts.items_of(experts, logits.shape[1])  # a result has one structure, differentiated or not
    return (Routing(weights, experts, logits), items), pullback


def _backward(settings: RouterSettings, pullback, gradients):
    dweights, _, dlogits = gradients[0]
    return pullback(dweights)[0] + dlogits, None


def _few(settings: RouterSettings, logits, choice_bias):
    weights, experts, items = few_experts.route(logits, settings, choice_bias)
    return Routing(weights, experts, logits), items


_unit = unit(_forward, _backward, few=_few)
