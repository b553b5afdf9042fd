"""The implementations of the three products over groups by name, in order of preference.

    matmul(x, w, group_sizes, rows, low_rank) -> y
    dx(dy, w, group_sizes, rows, low_rank) -> dx
    dw(dy, x, group_sizes, rows, dtype) -> dw

Each product chooses its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Registry, Target
from pallas_kernels.grouped_matmul import mosaic, triton, xla


class Case(NamedTuple):
    """A product and its device.

    Attributes:
        target: the device.
        rows: of all groups.
        shape: of the matrices, (groups, out, in).
        dtypes: of the operands and of the result.
    """

    target: Target
    rows: int
    shape: tuple[int, ...]
    dtypes: tuple[DTypeLike, DTypeLike]


def _why_not_mosaic(case: Case) -> str | None:
    return case.target.lacks((9, 0), exactly=True) or _why_not_any_kernel(case)


def _why_not_triton(case: Case) -> str | None:
    return case.target.lacks((8, 0)) or _why_not_any_kernel(case)


def _why_not_any_kernel(case: Case) -> str | None:
    operands, result = (jnp.dtype(dtype) for dtype in case.dtypes)
    if operands not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, not {operands}"
    if result not in (operands, jnp.float32):
        return f"it writes {operands} or float32, not {result}"
    if not case.rows or 0 in case.shape:
        return f"it takes no empty arrays, these are {case.rows} rows and matrices {case.shape}"
    return None


def _one_by_one(product):
    """Mapped by `jax.vmap`, products over groups are made one after the other: none of them has a batch of its own."""

    def call(*operands, **options):
        return jax.custom_batching.sequential_vmap(functools.partial(product, **options))(*operands)

    return call


def _registry(op: str, of_mosaic, of_triton, of_xla) -> Registry[Case]:
    implementations = {
        "mosaic": Implementation(_why_not_mosaic, _one_by_one(of_mosaic)),
        "triton": Implementation(_why_not_triton, _one_by_one(of_triton)),
        "xla": Implementation(lambda case: None, _one_by_one(of_xla)),
    }
    return Registry(op, implementations, lambda case: ("mosaic", "triton", "xla"))


MATMUL = _registry("grouped_matmul", mosaic.matmul, triton.matmul, xla.matmul)
DX = _registry("grouped_matmul_dx", mosaic.dx, triton.dx, xla.dx)
DW = _registry("grouped_matmul_dw", mosaic.dw, triton.dw, xla.dw)
