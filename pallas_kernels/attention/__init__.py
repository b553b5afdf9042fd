"""Scaled dot-product attention."""

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.config import SAVEABLE_NAMES, attention_implementation
from pallas_kernels.attention.ranges import SegmentRanges, segment_ranges

__all__ = ["SAVEABLE_NAMES", "SegmentRanges", "attention", "attention_implementation", "segment_ranges"]
