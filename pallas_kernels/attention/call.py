"""A call of attention as implementations judge it."""

from typing import NamedTuple

from jax import Array

from pallas_kernels.attention.options import Options
from pallas_kernels.dispatch import Target


class Call(NamedTuple):
    """A call of attention and its device.

    Attributes:
        target: the device.
        q: queries [B, S, H, D].
        k: keys [B, T, K, D].
        v: values [B, T, K, Dv].
        options: the static part.
        documents: whether there are documents.
        disorder: why no ranges can be made of the documents' ids; None where they can or there are no ids.
        offset: the position of the first query among the keys or, where that is known only at run time, a clause that
            says so.
        sinks: whether there are sinks.
        lse_gradient: for a backward pass: whether the log-sum-exp has a gradient.
    """

    target: Target
    q: Array
    k: Array
    v: Array
    options: Options
    documents: bool = False
    disorder: str | None = None
    offset: int | str = 0
    sinks: bool = False
    lse_gradient: bool = False
