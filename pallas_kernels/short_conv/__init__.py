"""Short causal convolutions of every channel by itself."""

from pallas_kernels.short_conv.api import short_conv

__all__ = ["short_conv"]
