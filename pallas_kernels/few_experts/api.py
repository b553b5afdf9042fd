"""The passes between the large products of a mixture's experts with LoRA adapters (arXiv 2106.09685), for few tokens.

    w, e = the weights and experts of each token                                 `route`
    p = x·Aᵀ                                                                     `rank_products`
    h = act(gate) · up,  [gate | up] = base + p·(s·B)ᵀ + bias,  p' = h·Cᵀ        `gate`
    out = Σ w·(base' + p'·(s·D)ᵀ + bias')                                        `combine`

Rows are the pairs of a token and one of its experts, token by token: nothing is sorted, gathered or padded. An *item*
is an expert and up to eight of its pairs (`items_of`), whose products read its matrices once, where they lie among all
experts': the large ones in `nf4.matmul_items`, A and B here, in the dtype that they are trained in. Programs of items
that are not in use end at once. Rank products come as addends in float32, as in `few_rows`. No backward pass: the unit
`fastjax.lora.experts` has one. In Pallas-Triton, for NVIDIA GPUs of compute capability 8.0 or more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import HALF, lacks_dtype, target
from pallas_kernels.few_experts import routing, triton
from pallas_kernels.few_experts.adapter import Adapter
from pallas_kernels.moe_routing import RouterSettings
from pallas_kernels.tiles import RANKS

MOST_TOKENS = 64
"""Tokens for which reading an expert's matrices once for each eight pairs costs little."""
SLOTS = 8
"""Most pairs of an item: rows of one matrix instruction in the large products."""
_GRAIN = 64
"""Features come in multiples of it."""


class Items(NamedTuple):
    """Experts, each with up to eight of its pairs.

    Attributes:
        table: int32; of each item its expert and its pairs, -1 in the place of none.
        count: int32; items in use, which come first.
    """

    table: Int[Array, "I slots+1"]
    count: Int[Array, "1"]


def why_not(tokens: int, dtype: DTypeLike, rank: int, *features: int) -> str | None:
    """Why these passes do not serve a call on the target, as a clause; None: they do.

    Args:
        tokens: N.
        dtype: of x.
        rank: the larger of the adapters', 0 without one.
        features: numbers of features that are read or written.
    """
    if reason := _why_not_here(tokens) or lacks_dtype(dtype, HALF):
        return reason
    if rank > RANKS[-1]:
        return f"it serves ranks up to {RANKS[-1]}, not {rank}"
    if any(count % _GRAIN for count in features):
        return f"it takes features in multiples of {_GRAIN}, not {features}"
    return None


def _why_not_here(tokens: int) -> str | None:
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return "it takes tokens on one device, and there are several"
    if reason := target().lacks((8, 0)):
        return reason
    return None if 0 < tokens <= MOST_TOKENS else f"it serves 1 to {MOST_TOKENS} tokens, not {tokens}"


def why_not_route(logits: Float[Array, "N X"], settings: RouterSettings) -> str | None:
    """Why `route` does not serve a call on the target, as a clause; None: it does."""
    tokens, experts = logits.shape
    if reason := _why_not_here(tokens) or lacks_dtype(logits.dtype, (jnp.float32,)):
        return reason
    if settings.groups > 1:
        return "it chooses among all experts, not among groups"
    if pl.next_power_of_2(tokens) * pl.next_power_of_2(experts) > routing.MOST_ELEMENTS:
        return f"it serves up to {routing.MOST_ELEMENTS} logits, these are {tokens}×{experts}"
    return None


def route(
    logits: Float[Array, "N X"], settings: RouterSettings, choice_bias: Float[Array, " X"] | None
) -> tuple[Float[Array, "N k"], Int[Array, "N k"], Items]:
    """The weights and experts of each token, as `moe_routing.route` gives them, and their items; one kernel.

    Args:
        logits: float32. NaN is chosen last.
        settings: the router's, without groups.
        choice_bias: added to the scores for the choice alone, or None.
    """
    sizes = _sizes(len(logits), logits.shape[1], settings.experts_per_token)
    weights, experts, *items = routing.route(logits, choice_bias, settings=settings, **sizes)
    return weights, experts, Items(*items)


def items_of(experts: Int[Array, "N k"], num_experts: int) -> Items:
    """The items of a routing, ordered by expert.

    Args:
        experts: of each token, k different ones.
        num_experts: X.
    """
    sizes = _sizes(len(experts), num_experts, experts.shape[1])
    return Items(*routing.items(experts, num_experts=num_experts, **sizes))


def _sizes(tokens: int, num_experts: int, chosen: int) -> dict[str, int]:
    """Slots of an item, and the most items: an expert's last one may have empty slots, every other one is full."""
    slots = min(tokens, SLOTS)
    return {"slots": slots, "most": min(tokens * chosen, num_experts + tokens * chosen // slots)}


def rank_products(x: Float[Array, "N in"], adapter: Adapter, items: Items, pairs: int) -> Float[Array, "C P R"]:
    """Addends of the rank products of each token with its experts' A.

    Args:
        x: bfloat16 or float16.
        adapter: of the projection that reads x.
        items: of the routing.
        pairs: P, N times the experts of a token.
    """
    return triton.rank_products(x, adapter, *items, pairs=pairs)


def gate(
    base: Float[Array, "P 2F"],
    products: Float[Array, "C P R"] | None,
    inner: Adapter | None,
    bias: Float[Array, "X 2F"] | None,
    outer: Adapter | None,
    items: Items,
    *,
    activation: str,
    clamp: tuple[float, float] | None,
) -> tuple[Float[Array, "P F"], Float[Array, "C P R"] | None]:
    """The gated product of each pair, and addends of its rank products for the projection that reads it.

    Args:
        base: gate and up.
        products: as `rank_products` gives them; None without an adapter.
        inner: the adapter of gate and up, or None.
        bias: of gate and up, or None.
        outer: the adapter of the projection that reads the result, or None.
        items: of the routing.
        activation: Hugging Face's name of act.
        clamp: limit and alpha of `glu.clamped_swiglu`, which then takes the place of act; or None.
    """
    options = {"activation": activation, "clamp": None if clamp is None else tuple(clamp)}
    return triton.gate(base, products, inner, bias, outer, *items, **options)


def combine(
    base: Float[Array, "P E"],
    products: Float[Array, "C P R"] | None,
    adapter: Adapter | None,
    bias: Float[Array, "X E"] | None,
    weights: Float[Array, "N k"],
    experts: Int[Array, "N k"],
) -> Float[Array, "N E"]:
    """The weighted sums of each token's pairs, in the dtype of base.

    Args:
        base: the experts' outputs without adapter and bias.
        products: as `gate` gives them; None without an adapter.
        adapter: of the projection back, or None.
        bias: its own, or None.
        weights: of each token's experts.
        experts: of each token.
    """
    return triton.combine(base, products, adapter, bias, weights, experts)
