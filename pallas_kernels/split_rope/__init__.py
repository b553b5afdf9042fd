"""Queries, keys and values out of one product, turned by their positions."""

from pallas_kernels.split_rope.api import REGISTRY, split_rope

__all__ = ["REGISTRY", "split_rope"]
