"""Weights in 16 bits, 8 or 4, behind one protocol."""

from fastjax.quantization.four_bits import Int4Weight, MXFP4Weight, NVFP4Weight
from fastjax.quantization.fp8 import FP8Weight
from fastjax.quantization.nf4 import NF4Weight
from fastjax.quantization.weight import Weight, read_in_place
from fastjax.quantization.weights import MixedWeight, WeightLike, as_weight, concatenate, dequantize, matmul, rows_of

__all__ = [
    "FP8Weight",
    "Int4Weight",
    "MXFP4Weight",
    "MixedWeight",
    "NF4Weight",
    "NVFP4Weight",
    "Weight",
    "WeightLike",
    "as_weight",
    "concatenate",
    "dequantize",
    "matmul",
    "read_in_place",
    "rows_of",
]
