"""Fake quantisers: the values that a format would decode to, with straight-through gradients."""

from fastjax.quantization.fake.schemes import ACTIVATIONS, WEIGHTS, Scheme
from fastjax.quantization.fake.straight_through import fake_quantize

__all__ = ["ACTIVATIONS", "WEIGHTS", "Scheme", "fake_quantize"]
