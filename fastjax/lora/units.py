"""Differentiable units: a forward pass with a backward pass of its own, the kernels inside, and the rows they have."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fastjax.parallel import ROWS, SHARES, local
from fastjax.quantization.float8 import row_specs
from pallas_kernels.float8 import Rounded, Scaled, flat_rows


class Tokens:
    """The tokens of the residual stream that a layer has: all of them. An execution that shares layers has others.

    Attributes:
        shared: whether several devices share the layer: each has some of the stream's tokens, and its products back to
            the stream are shares of a sum.
    """

    shared = False

    def all_of(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """The tokens of all devices, from each one's own."""
        return x

    def own_sums(self, x: Float[Array, "B S E"], travel: DTypeLike | None = None) -> Float[Array, "B S E"]:
        """The sums over the devices, of each one's own tokens; shares of other devices are rounded to `travel`."""
        return x


WHOLE = Tokens()


def unit(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    statics: int = 1,
    few: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The first result of a forward pass as a function that is differentiated by a backward pass.

    Args:
        forward: (static arguments, arguments) -> the result, and what the backward pass needs.
        backward: (static arguments, what it needs, the result's gradient) -> the arguments' gradients.
        statics: number of static arguments, which come first.
        few: the result where nothing is differentiated, of a few rows; None where it does not serve.
    """

    def result(*arguments: Any) -> Any:
        y = None if few is None else few(*arguments)
        return forward(*arguments)[0] if y is None else y

    function = jax.custom_vjp(result, nondiff_argnums=tuple(range(statics)))
    function.defvjp(forward, backward)
    return function


def on_rows(op: Callable[..., tuple[Any, ...]], rows: tuple[Any, ...], whole: tuple[Any, ...], *, sums: int = 0) -> Any:
    """The results of an operation over rows, on each device of its own tokens.

    Args:
        op: takes `rows` with one axis of tokens [N, …], then `whole`, each maybe None. Gives arrays [N, …], rows
            in float8 or None, then sums over its tokens.
        rows: arrays [B, S, …], of which the first leads, or products in float8.
        whole: arrays that are the same on all devices.
        sums: number of results that are sums over tokens, which are added up over the devices.
    """

    # A kernel sees one device's tokens: XLA would gather what it takes from all devices.
    def island(rows: tuple[Any, ...], whole: tuple[Any, ...]) -> Any:
        batch, length = jax.tree.leaves(rows)[0].shape[:2]
        results = op(*map(_flat, rows), *whole)
        count = len(results) - sums
        shares = jax.tree.map(lambda total: total[None], results[count:])
        return tuple(_over(array, batch, length) for array in results[:count]), shares

    specs = tuple(map(row_specs, rows)), P()
    results, shares = local(island, in_specs=specs, out_specs=(ROWS, SHARES))(rows, whole)
    return *results, *jax.tree.map(lambda share: jnp.sum(share, axis=0), shares)


def row_slices(counts: Iterable[int]) -> list[slice]:
    """The rows of each of several parts that lie one below the other.

    Args:
        counts: rows of each.
    """
    ends = [0, *itertools.accumulate(counts)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _flat(array: Any) -> Any:
    if array is None or isinstance(array, Scaled):
        return array if array is None else flat_rows(array)
    return array.reshape(-1, *array.shape[2:])


def _over(array: Any, batch: int, length: int) -> Any:
    if array is None or isinstance(array, Rounded):
        return array if array is None else array.over(batch, length)
    return array.reshape(batch, length, *array.shape[1:])
