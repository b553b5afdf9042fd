"""Matrix products in float8_e4m3fn."""

from pallas_kernels.float8.api import matmul, quantize_columns, quantize_rows
from pallas_kernels.float8.scales import scale_of

__all__ = ["matmul", "quantize_columns", "quantize_rows", "scale_of"]
