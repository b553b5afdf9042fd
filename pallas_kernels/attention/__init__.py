"""Scaled dot-product attention."""

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.config import SAVEABLE_NAMES

__all__ = ["SAVEABLE_NAMES", "attention"]
