"""NF4 for Hopper (sm_90a) in Mosaic GPU, split order: two decodes, and three products that decode as they multiply.

- `dequantize`: the whole matrix to memory; `dequantize_shared`: of which other devices have rows, read where they lie.
- `dequantize_transposed`: its transpose in float8_e4m3fn, with the scales.
- `matvec`: few rows, bound by the packed bytes; mma.sync, pairs of values from a table in shared memory;
  `matvec_items`: of rows with one of several matrices each.
- `matmul_rs`: more rows, and gradients; wgmma with the decoded weights in registers (RS).
"""

from pallas_kernels.nf4.mosaic_sm90.decode import dequantize, dequantize_shared
from pallas_kernels.nf4.mosaic_sm90.decode_transposed import COLUMNS, ROWS, dequantize_transposed
from pallas_kernels.nf4.mosaic_sm90.matmul_rs import matmul_rs
from pallas_kernels.nf4.mosaic_sm90.matvec import matvec, matvec_items

__all__ = [
    "COLUMNS",
    "ROWS",
    "dequantize",
    "dequantize_shared",
    "dequantize_transposed",
    "matmul_rs",
    "matvec",
    "matvec_items",
]
