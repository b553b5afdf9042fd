"""Short causal convolutions of every channel by itself."""

from pallas_kernels.short_conv.api import short_conv
from pallas_kernels.short_conv.token import short_conv_token

__all__ = ["short_conv", "short_conv_token"]
