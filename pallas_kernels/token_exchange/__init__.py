"""Tokens that devices share: all of them from each one's own, and sums over the devices for each one's own."""

from pallas_kernels.token_exchange.api import REGISTRY, all_tokens, own_sums

__all__ = ["REGISTRY", "all_tokens", "own_sums"]
