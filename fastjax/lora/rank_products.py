"""The rank products x·Aᵀ of several adapters at a time.

Adapters of one input are one matrix A [ΣR, in], so that x is read once for all of them; their B are one matrix
[out, ΣR] with a block for each, so that one product adds up their outputs. Each pass makes both anew from the trained
arrays: they are small.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.dropout import drop
from fastjax.quantization.weights import linear


class Part(NamedTuple):
    """The static description of a projection among those of one input.

    Attributes:
        name: its name, for the dropout's mask.
        rows: output rows.
        rank: of its adapter; 0: none.
        scaling: of the adapter.
        dropout: of the adapter's input.
    """

    name: str
    rows: int
    rank: int = 0
    scaling: float = 1.0
    dropout: float = 0.0


#: (A [R, in], B [out, R]) of the parts with an adapter, by name, in the dtype of training.
Matrices = Mapping[str, tuple[Array, Array]]


def with_adapter(parts: Sequence[Part]) -> list[Part]:
    """The parts with an adapter."""
    return [part for part in parts if part.rank]


def stacked_A(parts: Sequence[Part], matrices: Matrices, dtype: jnp.dtype) -> Float[Array, "R in"]:
    """A of all parts, one below the other."""
    return jnp.concatenate([matrices[part.name][0].astype(dtype) for part in with_adapter(parts)])


def scaled_B(part: Part, matrices: Matrices, dtype: jnp.dtype) -> Float[Array, "out R"]:
    """s·B of a part, scaled in float32 and rounded once."""
    return (matrices[part.name][1].astype(jnp.float32) * part.scaling).astype(dtype)


def block_B(parts: Sequence[Part], matrices: Matrices, dtype: jnp.dtype) -> Float[Array, "out R"]:
    """s·B of all parts, each in its own rows and columns."""
    total, start, blocks = sum(part.rank for part in parts), 0, []
    for part in parts:
        if not part.rank:
            blocks.append(jnp.zeros((part.rows, total), dtype))
            continue
        sides = (start, total - start - part.rank)
        blocks.append(jnp.pad(scaled_B(part, matrices, dtype), ((0, 0), sides)))
        start += part.rank
    return jnp.concatenate(blocks)


def drops(parts: Sequence[Part], key: PRNGKeyArray | None) -> bool:
    """Whether dropout gives each adapter an input of its own."""
    return key is not None and any(part.dropout for part in with_adapter(parts))


def rank_products(
    parts: Sequence[Part], matrices: Matrices, x: Float[Array, "B S in"], key: PRNGKeyArray | None
) -> Float[Array, "B S R"]:
    """x·Aᵀ of all parts side by side, in the dtype of x; of the dropped x where there is a key."""
    if not drops(parts, key):
        return linear(x, stacked_A(parts, matrices, x.dtype))
    return jnp.concatenate(
        [linear(drop(x, key, part.name, part.dropout), matrices[part.name][0]) for part in with_adapter(parts)], axis=-1
    )


def rank_product_gradients(
    parts: Sequence[Part],
    matrices: Matrices,
    x: Float[Array, "B S in"],
    dproducts: Float[Array, "B S R"],
    key: PRNGKeyArray | None,
) -> tuple[Float[Array, "B S in"], dict[str, Float[Array, "R in"]]]:
    """Gradients of rank products: of x, in its dtype, and of A of each part, float32.

    Args:
        parts: as in `rank_products`.
        matrices: likewise.
        x: likewise; the masks are drawn again.
        dproducts: the gradient of the products.
        key: likewise.
    """
    own = with_adapter(parts)
    starts = [sum(part.rank for part in own[:number]) for number in range(len(own))]
    if not drops(parts, key):
        whole = over_tokens(dproducts, x)
        dA = {part.name: whole[start : start + part.rank] for part, start in zip(own, starts, strict=True)}
        return linear(dproducts, stacked_A(parts, matrices, x.dtype).T), dA
    dx, dA = jnp.zeros_like(x), {}
    for part, start in zip(own, starts, strict=True):
        mine = dproducts[..., start : start + part.rank]
        dA[part.name] = over_tokens(mine, drop(x, key, part.name, part.dropout))
        # a mask and a factor: its transpose is itself
        dx = dx + drop(linear(mine, matrices[part.name][0].T), key, part.name, part.dropout)
    return dx, dA


def over_tokens(left: Float[Array, "B S M"], right: Float[Array, "B S N"]) -> Float[Array, "M N"]:
    """leftᵀ·right, summed over all tokens, float32."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dims = (((0, 1), (0, 1)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)


def into_dtypes(gradients: Mapping[str, tuple[Array, Array]], matrices: Matrices) -> dict[str, tuple[Array, Array]]:
    """Gradients of A and B in the dtypes of these."""
    return {
        name: (dA.astype(matrices[name][0].dtype), dB.astype(matrices[name][1].dtype))
        for name, (dA, dB) in gradients.items()
    }
