"""Products over groups on Hopper."""

from pallas_kernels.grouped_matmul.mosaic_sm90.dw import dw
from pallas_kernels.grouped_matmul.mosaic_sm90.matmul import matmul

__all__ = ["dw", "matmul"]
