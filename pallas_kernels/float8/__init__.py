"""Matrix products in float8_e4m3fn."""

from pallas_kernels.float8.api import matmul, matmul_scaled, quantize_columns, quantize_rows
from pallas_kernels.float8.scaled import Rounded, Scaled, flat_rows, product_of, scaled_values
from pallas_kernels.float8.scales import scale_of

__all__ = [
    "Rounded",
    "Scaled",
    "flat_rows",
    "matmul",
    "matmul_scaled",
    "product_of",
    "quantize_columns",
    "quantize_rows",
    "scale_of",
    "scaled_values",
]
