"""Gated linear units."""

from pallas_kernels.glu.api import ACTIVATIONS, clamped_swiglu, glu

__all__ = ["ACTIVATIONS", "clamped_swiglu", "glu"]
