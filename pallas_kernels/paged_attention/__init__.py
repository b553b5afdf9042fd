"""Attention of one new token a row to the keys and values of its pages."""

from pallas_kernels.paged_attention.api import REGISTRY, paged_attention

__all__ = ["REGISTRY", "paged_attention"]
