"""The gated delta rule: linear attention that forgets and corrects (arXiv 2412.06464)."""

from pallas_kernels.gated_delta.api import REGISTRY, gated_delta

__all__ = ["REGISTRY", "gated_delta"]
