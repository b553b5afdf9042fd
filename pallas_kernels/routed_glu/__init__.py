"""The gated block's inside of rows that are sorted by expert, of which only the first have one."""

from pallas_kernels.routed_glu.api import REGISTRY, gradients, routed_glu

__all__ = ["REGISTRY", "gradients", "routed_glu"]
