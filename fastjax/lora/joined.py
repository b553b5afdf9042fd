"""Adapters of several models on one projection as one adapter, of which each token has a part, or none.

    [A₁; …; A_N] · x = p        y = W·x + [s₁·B₁ | … | s_N·B_N] · (p where the token's adapter is n, else 0)

So a batch of rows with any mixture of adapters takes the products of one adapter, whose rank is the sum of theirs
(Punica, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285, gather each row's matrices instead). The others' products are
zeros, not small numbers: what a token gets is what it gets from its adapter alone.
"""

from collections.abc import Sequence

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


def joined(adapters: Sequence[LoraLinear | None], ranks: Sequence[int], dtype: jnp.dtype) -> LoraLinear:
    """One adapter of several, for generation: without dropout, with the factors in B.

    Args:
        adapters: of one projection, in the order of the numbers, one at least; without DoRA; None: it has none.
        ranks: that each has in the joined one, at least its own; those beyond are zeros.
        dtype: of the computation, in which A and s·B are held.
    """
    present = next(adapter for adapter in adapters if adapter is not None)
    a_shape, b_shape = present.lora_A.get_value().shape, present.lora_B.get_value().shape
    lora_A, lora_B = [], []
    for adapter, rank in zip(adapters, ranks, strict=True):
        a, b = jnp.zeros((0, 0), dtype), jnp.zeros((0, 0), dtype)
        if adapter is not None:
            a = adapter.lora_A.get_value().astype(dtype)
            b = (adapter.lora_B.get_value().astype(jnp.float32) * adapter.scaling).astype(dtype)
        lora_A.append(_padded(a, (*a_shape[:-2], rank, a_shape[-1])))
        lora_B.append(_padded(b, (*b_shape[:-1], rank)))
    whole_A, whole_B = jnp.concatenate(lora_A, axis=-2), jnp.concatenate(lora_B, axis=-1)
    return LoraLinear(whole_A, whole_B, None, scaling=1.0, dropout=0.0)


def _padded(array: Array, shape: tuple[int, ...]) -> Array:
    """The array with zeros behind it; zeros, if it is empty."""
    if not array.size:
        return jnp.zeros(shape, array.dtype)
    return jnp.pad(array, [(0, size - own) for size, own in zip(shape, array.shape, strict=True)])
