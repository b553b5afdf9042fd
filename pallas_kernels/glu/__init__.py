"""Gated linear units."""

from pallas_kernels.glu.api import ACTIVATIONS, glu

__all__ = ["ACTIVATIONS", "glu"]
