"""What an implementation is told of a call when it is asked whether it serves it."""

from typing import NamedTuple

from jax import Array

from pallas_kernels.attention.options import Options
from pallas_kernels.dispatch import Target


class Call(NamedTuple):
    """A call of attention, and the device that it is planned for.

    Attributes:
        target: the device.
        q: queries [B, S, H, D].
        k: keys [B, T, K, D].
        v: values [B, T, K, Dv].
        options: the static part.
        ranges: whether the documents are known as ranges, or are ids of which ranges can be made.
        segments: whether they are given as ids.
        offset: the position of the first query among the keys or, where that is known only at run time, a clause that
            says so.
        sinks: whether there are sinks.
    """

    target: Target
    q: Array
    k: Array
    v: Array
    options: Options
    ranges: bool = False
    segments: bool = False
    offset: int | str = 0
    sinks: bool = False
