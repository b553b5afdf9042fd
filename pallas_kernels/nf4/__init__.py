"""4-bit NormalFloat weights."""

from pallas_kernels.nf4.api import addends, dequantize, dequantize_float8, matmul
from pallas_kernels.nf4.codebook import DYNAMIC_MAP, NF4_VALUES
from pallas_kernels.nf4.items import matmul_items, why_not_items
from pallas_kernels.nf4.quantization import dequantize_absmax, mean, quantize, quantize_absmax, reorder

__all__ = [
    "DYNAMIC_MAP",
    "NF4_VALUES",
    "addends",
    "dequantize",
    "dequantize_absmax",
    "dequantize_float8",
    "matmul",
    "matmul_items",
    "mean",
    "quantize",
    "quantize_absmax",
    "reorder",
    "why_not_items",
]
