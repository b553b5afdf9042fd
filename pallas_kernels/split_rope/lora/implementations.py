"""The implementations of the way from projection to attention, by name, in order of preference.

Each is a pair of functions:

    forward(base, products, lora_B, cos, sin, heads) -> (queries, keys, values)
    backward(dq, dk, dv, products, lora_B, cos, sin, heads, rounded) -> what `api.Gradients` holds
"""

import functools
from typing import NamedTuple

from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import low_rank
from pallas_kernels.dispatch import Target, triton_or_xla
from pallas_kernels.float8.scaled import Scaled
from pallas_kernels.split_rope.lora import config, triton, xla


class Case(NamedTuple):
    """A call and its device.

    Attributes:
        target: the device.
        rows: N.
        heads: of queries and of keys.
        size: of a head.
        dtype: of the activations.
        rank: of the adapters.
    """

    target: Target
    rows: int
    heads: tuple[int, int]
    size: int
    dtype: DTypeLike
    rank: int


def _why_not_triton(case: Case) -> str | None:
    parts = tuple(count * case.size for count in (case.heads[0], case.heads[1], case.heads[1]))
    sums = low_rank.Case(case.target, case.rows, parts, case.dtype, case.rank)
    if reason := low_rank.ADD["triton"].why_not(sums):
        return reason
    if case.size not in config.SIZES:
        return f"it serves head sizes {list(config.SIZES)}, not {case.size}"
    return None


def _triton_forward(
    base: Array | Scaled, products: Array, lora_B: Array, cos: Array, sin: Array, heads: tuple[int, int]
):
    return triton.forward(base, products, lora_B, cos, sin, heads, config.TILES)


REGISTRY = triton_or_xla(
    "split_rope.lora",
    _why_not_triton,
    (_triton_forward, functools.partial(xla.backward, implementation=None)),
    (
        functools.partial(xla.forward, implementation="xla"),
        functools.partial(xla.backward, implementation="xla"),
    ),
)
