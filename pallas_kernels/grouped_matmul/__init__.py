"""Matrix products over groups of rows: the experts of a mixture."""

from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_matmul_dw, grouped_matmul_dx
from pallas_kernels.grouped_matmul.nf4 import grouped_nf4_matmul
from pallas_kernels.grouped_matmul.schedule import ZEROS_BEHIND

__all__ = ["ZEROS_BEHIND", "grouped_matmul", "grouped_matmul_dw", "grouped_matmul_dx", "grouped_nf4_matmul"]
