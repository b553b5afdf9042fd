"""Scaled dot-product attention."""

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.config import SAVEABLE_NAMES, attention_implementation
from pallas_kernels.attention.ranges import SegmentRanges, segment_ranges
from pallas_kernels.attention.ring import ring_attention

__all__ = [
    "SAVEABLE_NAMES",
    "SegmentRanges",
    "attention",
    "attention_implementation",
    "ring_attention",
    "segment_ranges",
]
