"""Weights in 16 bits or 4, behind one `matmul`."""

from fastjax.quantization.nf4 import NF4Weight
from fastjax.quantization.weights import MixedWeight, concatenate, dense, matmul, out_features, part

__all__ = ["MixedWeight", "NF4Weight", "concatenate", "dense", "matmul", "out_features", "part"]
