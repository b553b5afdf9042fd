"""The experts of a mixture for a few tokens, as in decoding."""

from pallas_kernels.few_experts.adapter import Adapter
from pallas_kernels.few_experts.api import Items, combine, gate, items_of, rank_products, route, why_not, why_not_route

__all__ = ["Adapter", "Items", "combine", "gate", "items_of", "rank_products", "route", "why_not", "why_not_route"]
