"""The implementations of the three products over groups by name, in order of preference.

    matmul(x, w, group_sizes, rows) -> y
    dx(dy, w, group_sizes) -> dx
    dw(dy, x, group_sizes, rows, dtype) -> dw

Each product chooses its own.
"""

from typing import NamedTuple

from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Registry, Target
from pallas_kernels.grouped_matmul import xla


class Case(NamedTuple):
    """A product and its device.

    Attributes:
        target: the device.
        rows: of all groups.
        shape: of the matrices, (groups, out, in).
        dtypes: of the two operands and of the result.
        gathered: whether x's rows are chosen by an index.
    """

    target: Target
    rows: int
    shape: tuple[int, ...]
    dtypes: tuple[DTypeLike, DTypeLike, DTypeLike]
    gathered: bool


MATMUL: Registry[Case] = Registry(
    "grouped_matmul", {"xla": Implementation(lambda case: None, xla.matmul)}, lambda case: ("xla",)
)
DX: Registry[Case] = Registry(
    "grouped_matmul_dx", {"xla": Implementation(lambda case: None, xla.dx)}, lambda case: ("xla",)
)
DW: Registry[Case] = Registry(
    "grouped_matmul_dw", {"xla": Implementation(lambda case: None, xla.dw)}, lambda case: ("xla",)
)
