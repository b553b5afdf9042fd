"""Arrays of which each device has a shard, one layer of a stack at a time."""

from pallas_kernels.shard_gather.api import REGISTRY, gather, why_not_peers
from pallas_kernels.shard_gather.shared import Shared, whole

__all__ = ["REGISTRY", "Shared", "gather", "whole", "why_not_peers"]
