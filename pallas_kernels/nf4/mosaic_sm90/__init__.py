"""NF4 for Hopper (sm_90a) in Mosaic GPU, split order: decoding, and three products that decode as they multiply.

- `dequantize`: the whole matrix to memory.
- `few_tokens`: products with a few rows, bound by the packed bytes; in registers from the codes to the sum.
- `in_registers`: products with some hundred rows and their gradients, bound by the tensor cores; decoded in registers.
- `fused`: the same with fewer rows, and for matrices that the other leaves out; decoded into shared memory.
"""

from pallas_kernels.nf4.mosaic_sm90.decode import dequantize
from pallas_kernels.nf4.mosaic_sm90.few_tokens import few_tokens
from pallas_kernels.nf4.mosaic_sm90.fused import fused
from pallas_kernels.nf4.mosaic_sm90.in_registers import in_registers

__all__ = ["CORES", "dequantize", "few_tokens", "fused", "in_registers"]

CORES = 132
"""Multiprocessors of an H200."""
