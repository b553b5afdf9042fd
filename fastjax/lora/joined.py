"""Adapters of several models on one projection as one adapter, of which each token has a part, or none.

    [A₁; …; A_N] · x = p        y = W·x + [s₁·B₁ | … | s_N·B_N] · (p where the token's adapter is n, else 0)

So a batch of rows with any mixture of adapters takes the products of one adapter, whose rank is the sum of theirs
(Punica, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285, gather each row's matrices instead). The others' products are
zeros, not small numbers: what a token gets is what it gets from its adapter alone.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fastjax.lora.params import LoraLinear
from pallas_kernels.tiles import padded_rank

#: Owner of the ranks behind the last adapter's, up to one that kernels serve.
_NOBODY = -2


def rank_owners(ranks: Sequence[int]) -> Int[np.ndarray, " R"]:
    """The number of the adapter that each rank of joined ones is of, up to a rank that kernels serve.

    Args:
        ranks: of each adapter, everywhere.
    """
    owners = np.repeat(np.arange(len(ranks), dtype=np.int32), ranks)
    return np.pad(owners, (0, padded_rank(len(owners)) - len(owners)), constant_values=_NOBODY)


def room(leading: Sequence[int], rows: int, columns: int, ranks: Sequence[int], dtype: jnp.dtype) -> LoraLinear:
    """A joined adapter of none yet: zeros, which add nothing.

    Args:
        leading: axes of a stack of layers.
        rows: of the projection's output.
        columns: of its input.
        ranks: of each adapter.
        dtype: of the computation, in which A and s·B are held.
    """
    shapes = (*leading, sum(ranks), columns), (*leading, rows, sum(ranks))
    lora_A, lora_B = (jnp.zeros(shape, dtype) for shape in shapes)
    return LoraLinear(lora_A, lora_B, None, scaling=1.0, dropout=0.0, largest=max(ranks))


def put(whole: Array, own: Array | None, ranks: range, axis: int, factor: float) -> Array:
    """A or B of a joined adapter with one of its adapters in the place of what stood there.

    It is made on the host, so that no rank of an adapter compiles anything.

    Args:
        whole: of the joined one.
        own: of the adapter, of at most so many ranks; None: it has none.
        ranks: its part of the joined one's; those beyond its own are zeros.
        axis: of the ranks, -2 of A and -1 of B.
        factor: of `own`.
    """
    shape = list(whole.shape)
    shape[axis] = len(ranks)
    part = np.zeros(shape, whole.dtype)
    if own is not None:
        part[tuple(map(slice, own.shape))] = np.asarray(own, np.float32) * factor
    written = _written(whole, part, ranks.start, axis)
    return written if written.sharding == whole.sharding else jax.device_put(written, whole.sharding)


@functools.partial(jax.jit, static_argnames=("axis",))
def _written(whole: Array, part: Array, start: Int[Array, ""], axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis)
