"""Weights in 16 bits, 8 or 4, behind one `matmul`."""

from fastjax.quantization.fp8 import FP8Weight
from fastjax.quantization.nf4 import NF4Weight
from fastjax.quantization.weights import MixedWeight, concatenate, dense, matmul, out_features, part

__all__ = ["FP8Weight", "MixedWeight", "NF4Weight", "concatenate", "dense", "matmul", "out_features", "part"]
