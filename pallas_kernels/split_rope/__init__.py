"""Queries, keys and values out of one product, turned by their positions."""

from pallas_kernels.split_rope.api import split_rope
from pallas_kernels.split_rope.implementations import REGISTRY, Case

__all__ = ["REGISTRY", "Case", "split_rope"]
