"""The rank products x·Aᵀ of several adapters at a time.

Adapters of one input are one matrix A [P·R, in], so that x is read once for all of them: each of the P parts has R rows
of its own, the largest rank padded with zeros to one that kernels serve. Their B are one matrix [out, R]. Each pass
makes both anew from the trained arrays: they are small.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, PRNGKeyArray

from fastjax.lora.dropout import drop
from fastjax.lora.units import WHOLE, Tokens, on_rows, row_slices
from fastjax.quantization.dense import linear
from fastjax.quantization.weights import WeightLike, as_weight
from pallas_kernels.float8 import Rounded, Scaled, product_of, scaled_values
from pallas_kernels.low_rank import (
    low_rank_add,
    low_rank_input_gradients,
    low_rank_output_gradients,
    low_rank_round_rows,
)
from pallas_kernels.tiles import padded_rank


class PartSpec(NamedTuple):
    """The static description of a projection among those of one input.

    Attributes:
        name: its name, for the dropout's mask.
        rows: output rows.
        rank: of its adapter; 0: none.
        scaling: of the adapter.
        dropout: of the adapter's input.
        largest: where adapters are joined (`lora.joined`) the largest rank of one; 0: they are not.
        tokens: which its output has. Devices that share the layer sum their products before B's are added: these can be
            smaller than the rounding error of one device's share, and would be lost.
    """

    name: str
    rows: int
    rank: int = 0
    scaling: float = 1.0
    dropout: float = 0.0
    largest: int = 0
    tokens: Tokens = WHOLE


#: (A [R, in], B [out, R]) of the parts with an adapter, by name, in the dtype of training; where adapters are joined
#: (`lora.joined`) also which of its rank products each token has, 1 or 0, int8 [B, S, `padded_rank(R)`], alike for all.
Matrices = Mapping[str, tuple[Array, ...]]


def with_adapter(parts: Sequence[PartSpec]) -> list[PartSpec]:
    """The parts with an adapter."""
    return [part for part in parts if part.rank]


def slot(parts: Sequence[PartSpec]) -> int:
    """R: the rows of A, and columns of rank products and of B, that each part has."""
    return padded_rank(max(part.rank for part in parts))


def stacked_A(
    parts: Sequence[PartSpec], matrices: Matrices, dtype: jnp.dtype, rank: int | None = None
) -> Float[Array, "PR in"]:
    """A of all parts, one below the other, each padded to `rank` rows; None: `slot`."""
    rank, width = slot(parts) if rank is None else rank, matrices[with_adapter(parts)[0].name][0].shape[1]
    blocks = [matrices[part.name][0].astype(dtype) if part.rank else jnp.zeros((0, width), dtype) for part in parts]
    return jnp.concatenate([_padded(a, rank - a.shape[0], axis=0) for a in blocks])


def scaled_B(part: PartSpec, matrices: Matrices, dtype: jnp.dtype) -> Float[Array, "out R"]:
    """s·B of a part, scaled in float32 and rounded once."""
    return (matrices[part.name][1].astype(jnp.float32) * part.scaling).astype(dtype)


def padded_A(
    parts: Sequence[PartSpec], matrices: Matrices, dtype: jnp.dtype, rank: int | None = None
) -> Float[Array, "R in"]:
    """`stacked_A` with zeros below it, up to a number of rows that kernels serve."""
    a = stacked_A(parts, matrices, dtype, rank)
    return _padded(a, padded_rank(a.shape[0]) - a.shape[0], axis=0)


def gradients_of_A(parts: Sequence[PartSpec], dA: Float[Array, "PR in"], rank: int) -> dict[str, Float[Array, "R in"]]:
    """The gradient of A of each part, out of that of `stacked_A` or `padded_A`."""
    return {part.name: dA[number * rank :][: part.rank] for number, part in enumerate(parts) if part.rank}


def stacked_B(
    parts: Sequence[PartSpec], matrices: Matrices, dtype: jnp.dtype, rank: int | None = None
) -> Float[Array, "out R"]:
    """s·B of all parts, one below the other, each padded to `rank` columns; None: `slot`."""
    rank = slot(parts) if rank is None else rank
    blocks = [scaled_B(part, matrices, dtype) if part.rank else jnp.zeros((part.rows, 0), dtype) for part in parts]
    return jnp.concatenate([_padded(b, rank - b.shape[1], axis=1) for b in blocks])


def drops(parts: Sequence[PartSpec], key: PRNGKeyArray | None) -> bool:
    """Whether dropout gives each adapter an input of its own."""
    return key is not None and any(part.dropout for part in with_adapter(parts))


def rank_products(
    parts: Sequence[PartSpec],
    matrices: Matrices,
    x: Float[Array, "B S in"],
    key: PRNGKeyArray | None,
    rank: int | None = None,
) -> Float[Array, "B S PR"]:
    """x·Aᵀ of all parts side by side, `rank` columns each, in the dtype of x; of the dropped x where there is a key."""
    rank = slot(parts) if rank is None else rank
    if not drops(parts, key):
        return linear(x, stacked_A(parts, matrices, x.dtype, rank))
    products = []
    for part in parts:
        if part.rank:
            product = linear(drop(x, key, part.name, part.dropout), matrices[part.name][0])
        else:
            product = jnp.zeros((*x.shape[:-1], 0), x.dtype)
        products.append(_padded(product, rank - part.rank, axis=-1))
    return jnp.concatenate(products, axis=-1)


def choice_of(matrices: Matrices) -> Int8[Array, "B S R"] | None:
    """Which rank products each token has, where adapters are joined; None: every token has all."""
    return next((each[2] for each in matrices.values() if len(each) > 2), None)


def chosen_products(
    parts: Sequence[PartSpec], matrices: Matrices, products: Float[Array, "B S PR"]
) -> Float[Array, "B S PR"]:
    """The rank products as B is to take them: zeros for those that a token does not have, where adapters are joined.

    Args:
        parts: as in `rank_products`.
        matrices: as there.
        products: as it gives them.
    """
    chosen = choice_of(matrices)
    if chosen is None:
        return products
    apart = products.reshape(*products.shape[:-1], len(parts), -1)
    chosen = _padded(chosen, apart.shape[-1] - chosen.shape[-1], axis=-1)
    return jnp.where(chosen[:, :, None, :] != 0, apart, 0.0).reshape(products.shape)


def rank_product_gradients(
    parts: Sequence[PartSpec],
    matrices: Matrices,
    dx: Float[Array, "B S in"],
    x: Float[Array, "B S in"],
    dproducts: Float[Array, "B S PR"],
    key: PRNGKeyArray | None,
) -> tuple[Float[Array, "B S in"], dict[str, Float[Array, "R in"]]]:
    """Gradients behind rank products: of x, in its dtype, and of A of each part, float32.

    Args:
        parts: as in `rank_products`.
        matrices: as there.
        dx: the gradient of x by other ways, which is added.
        x: as in `rank_products`; the masks are drawn again.
        dproducts: the gradient of the products.
        key: as in `rank_products`.
    """
    rank = dproducts.shape[-1] // len(parts)
    if not drops(parts, key):
        a = padded_A(parts, matrices, x.dtype, rank)
        dproducts = _padded(dproducts, a.shape[0] - dproducts.shape[-1], axis=-1)
        dx, whole = on_rows(low_rank_input_gradients, (dx, x, dproducts), (a,), sums=1)
        return dx, gradients_of_A(parts, whole, rank)
    dA = {}
    for number, part in enumerate(parts):
        if not part.rank:
            continue
        dproduct = dproducts[..., number * rank :][..., : part.rank]
        dA[part.name] = over_tokens(dproduct, drop(x, key, part.name, part.dropout))
        # a mask and a factor: its transpose is itself
        dx = dx + drop(linear(dproduct, matrices[part.name][0].T), key, part.name, part.dropout)
    return dx, dA


def large_product(
    parts: Sequence[PartSpec], weight: WeightLike, x: Float[Array, "B S in"] | Rounded, dtype: DTypeLike
) -> Float[Array, "B S out"] | Scaled:
    """x·Wᵀ as `add_products` takes it: summed over the devices that share the layer, for this device's tokens alone.

    Beside adapters it is in float32, so that the sum is rounded once (of up to 64 rows NF4's kernel may round before).
    Of a product that is rounded before, a sum with a fresh adapter's small addend is mostly the product again, or one
    more addend brings it where the small one counts many times. A device's own share is not, the others' may be.

    Args:
        parts: of the weight.
        weight: [out, in].
        x: the input, in float8 where the weight's products read that.
        dtype: of the computation, in which shares of the sum travel.
    """
    large: Any = as_weight(weight)
    product = large.matmul_scaled(x, jnp.float32 if with_adapter(parts) else None)
    if not parts[0].tokens.shared:
        return product
    return parts[0].tokens.own_sums(scaled_values(product).astype(product_of(product).dtype), dtype)


def add_products(
    parts: Sequence[PartSpec],
    base: Float[Array, "B S out"] | Scaled,
    products: Float[Array, "B S PR"],
    lora_B: Float[Array, "out R"],
    residual: Float[Array, "B S out"] | None = None,
) -> Float[Array, "B S out"]:
    """The sum base + products·Bᵀ, and `residual` where there is one, on each device of its own rows.

    Args:
        parts: of `base`.
        base: `large_product`; one in float8 may have its scales beside it.
        products: the rank products of its parts.
        lora_B: `stacked_B`.
        residual: one more addend, in the dtype of the products.
    """

    def add(base, products, residual, lora_B):
        return (low_rank_add(base, products, lora_B, parts=_sizes(parts), residual=residual),)

    (total,) = on_rows(add, (base, products, residual), (lora_B,))
    return total


def product_gradients(
    parts: Sequence[PartSpec], dy: Float[Array, "B S out"], products: Float[Array, "B S PR"], lora_B
) -> tuple[Float[Array, "B S PR"], dict[str, Float[Array, "out R"]]]:
    """Gradients of the rank products, in the dtype of dy, and of B of each part, float32.

    Args:
        parts: of dy.
        dy: the gradient of `add_products`.
        products: as there.
        lora_B: as there.
    """

    def gradients(dy, products, lora_B):
        return low_rank_output_gradients(dy, products, lora_B, parts=_sizes(parts))[:2]

    dproducts, dB = on_rows(gradients, (dy, products), (lora_B,), sums=1)
    return dproducts, gradients_of_B(parts, dB)


def rounded_with_products(
    parts: Sequence[PartSpec],
    dy: Float[Array, "B S out"],
    absmax: Float[Array, "B S"],
    lora_B: Float[Array, "out R"],
) -> tuple[Float[Array, "B S PR"], Rounded]:
    """The gradient of the rank products, in the dtype of dy, and dy in float8.

    Args:
        parts: of dy.
        dy: the gradient of `add_products`.
        absmax: the largest magnitude in each of its rows.
        lora_B: as there.
    """
    return on_rows(functools.partial(low_rank_round_rows, parts=_sizes(parts)), (dy, absmax), (lora_B,))


def gradients_of_B(parts: Sequence[PartSpec], dB: Float[Array, "out R"]) -> dict[str, Float[Array, "out R"]]:
    """The gradient of B of each part, out of that of `stacked_B`."""
    pairs = zip(parts, row_slices(_sizes(parts)), strict=True)
    return {part.name: dB[here, : part.rank] * part.scaling for part, here in pairs if part.rank}


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


def _padded(array: Array, count: int, *, axis: int) -> Array:
    """The array with `count` zeros behind an axis."""
    if not count:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, count)
    return jnp.pad(array, widths)


def _sizes(parts: Sequence[PartSpec]) -> tuple[int, ...]:
    return tuple(part.rows for part in parts)
