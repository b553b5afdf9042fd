"""The gated delta rule: linear attention that forgets and corrects (arXiv 2412.06464)."""

from pallas_kernels.gated_delta.api import REGISTRY, gated_delta
from pallas_kernels.gated_delta.token import gated_delta_token

__all__ = ["REGISTRY", "gated_delta", "gated_delta_token"]
