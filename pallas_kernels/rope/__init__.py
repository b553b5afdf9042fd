"""Rotary position embedding."""

from pallas_kernels.rope.api import rope

__all__ = ["rope"]
