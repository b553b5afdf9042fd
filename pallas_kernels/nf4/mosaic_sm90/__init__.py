"""NF4 for Hopper (sm_90a) in Mosaic GPU, split order: decoding, and three products that decode as they multiply.

- `dequantize`: the whole matrix to memory.
- `few_tokens`: products with a few rows, bound by the packed bytes; in registers from the codes to the sum.
- `fused`: products with some hundred rows and their gradients, bound by the tensor cores; decoded in shared memory.
- `in_registers`: the same product, decoded in registers.
"""

from pallas_kernels.nf4.mosaic_sm90.decode import dequantize
from pallas_kernels.nf4.mosaic_sm90.few_tokens import COLUMNS, few_tokens
from pallas_kernels.nf4.mosaic_sm90.fused import fused
from pallas_kernels.nf4.mosaic_sm90.in_registers import in_registers

__all__ = ["COLUMNS", "CORES", "dequantize", "few_tokens", "fused", "in_registers"]

CORES = 132
"""Multiprocessors of an H200."""
