"""Gated linear units."""

from pallas_kernels.glu.api import ACTIVATIONS, glu
from pallas_kernels.glu.clamped import clamped_swiglu

__all__ = ["ACTIVATIONS", "clamped_swiglu", "glu"]
