"""A gated block with its adapters, down(act(gate(x)) · up(x)), as one differentiable unit.

    [gate | up] = x·Wᵀ          p = x·Aᵀ          h = act(gate + p·Bᵀ) · (up + p·Bᵀ)
    y = h·Vᵀ + (h·Cᵀ)·(s·D)ᵀ + r              r: a residual stream, or nothing

The adapters of gate and up are applied where gate and up are read for h (`pallas_kernels.glu.lora`), without a pass
over arrays of that size; their biases are one more column of B, whose rank product is 1. The backward pass keeps x,
[gate | up] and the rank products. It makes the gradients of B and C where gate, up and h are in registers anyway, and
passes dh and [dgate | dup] on to the large products as they are. Without any adapter the weights are trained: h, which
the gradient of V takes, is written over dh. No dense B·A is formed and no decoded weight is kept.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.few_rows import Addends, adapters_of, flat, served
from fastjax.lora.norm import PreparedRows
from fastjax.lora.rank_products import (
    Matrices,
    PartSpec,
    add_products,
    chosen_products,
    drops,
    into_dtypes,
    large_product,
    product_gradients,
    rank_product_gradients,
    rank_products,
    rounded_with_products,
    stacked_A,
    stacked_B,
    with_adapter,
)
from fastjax.lora.units import on_rows, unit
from fastjax.quantization.dense import linear
from fastjax.quantization.weight import Weight
from fastjax.quantization.weights import WeightLike, as_weight
from fastjax.residuals import name_residual
from pallas_kernels import few_rows
from pallas_kernels.float8 import scaled_values
from pallas_kernels.glu.lora import Inner, glu_lora_backward, glu_lora_forward
from pallas_kernels.low_rank import block_matrix
from pallas_kernels.tiles import padded_rank


class Block(NamedTuple):
    """The static description of a gated block.

    Attributes:
        activation: Hugging Face's name of act.
        parts: gate and up, or one part of both.
        down: the projection back.
    """

    activation: str
    parts: tuple[PartSpec, ...]
    down: PartSpec

    @property
    def adapted(self) -> bool:
        """Whether there is an adapter."""
        return any(part.rank for part in (*self.parts, self.down))

    @property
    def features(self) -> int:
        """F."""
        return sum(part.rows for part in self.parts) // 2

    def inner_rank(self, bias: bool) -> int:
        """Columns of B in `glu.lora`, of gate as of up; 0: nothing to add.

        Args:
            bias: whether there is a bias.
        """
        widest = max(part.rank for part in self.parts) + bias
        return padded_rank(widest) if widest else 0


class Operands(NamedTuple):
    """The unit's operands besides its input.

    Attributes:
        gate_up: [2F, E].
        bias: of gate and up, [2F], or None.
        down: [E, F].
        matrices: of the adapters.
        key: the layer's dropout key; None switches dropout off.
        prepared: x as `norm` prepares it, which then makes the gradients through A.
    """

    gate_up: WeightLike
    bias: Float[Array, " 2F"] | None
    down: WeightLike
    matrices: Matrices
    key: PRNGKeyArray | None
    prepared: PreparedRows | None = None


def gated_block(
    block: Block, x: Float[Array, "B S E"], arrays: Operands, residual: Float[Array, "B S E"] | None = None
) -> Float[Array, "B S E"]:
    """The block without the down projection's bias, in the dtype of x.

    Args:
        block: its description.
        x: the input, in the dtype of the computation.
        arrays: weights, adapters, key.
        residual: added to the output.
    """
    return _unit(block, x, residual, arrays)


def _forward(block: Block, x, residual, arrays: Operands):
    rows: Any = x if arrays.prepared is None or arrays.prepared.rows is None else arrays.prepared.rows
    gate_up: Any = as_weight(arrays.gate_up).matmul_scaled(rows)
    gate_up = jax.tree.map(lambda array: name_residual(array, "projection"), gate_up)
    inner = _inner(block, x, arrays)
    inside = block.down.rank and not drops((block.down,), arrays.key)
    down_A = stacked_A((block.down,), arrays.matrices, x.dtype) if inside else None
    below, tokens = as_weight(arrays.down), block.down.tokens
    # An adapter whose input is dropped reads h itself.
    rounded = bool(inside or not block.down.rank) and x.dtype == jnp.bfloat16 and below.reads_rounded(False)
    h, product_down = _gate(block, gate_up, inner, down_A, rounded=rounded)
    if block.down.rank:
        if product_down is None:
            product_down = rank_products((block.down,), arrays.matrices, h, arrays.key)
        chosen = chosen_products((block.down,), arrays.matrices, product_down)
        product_down = name_residual(tokens.own_sums(chosen), "lora")
        lora_B = stacked_B((block.down,), arrays.matrices, x.dtype)
        y = add_products((block.down,), large_product((block.down,), below, h, x.dtype), product_down, lora_B, residual)
    else:
        y = scaled_values(large_product((block.down,), below, h, x.dtype)).astype(x.dtype)
        y = y if residual is None else residual + y
    products = None if inner is None else inner.products
    return y, (x, gate_up, products, product_down, arrays, residual is not None)


def _few(block: Block, x, residual, arrays: Operands):
    inner, down = (adapters_of(parts, arrays.matrices) for parts in (block.parts, (block.down,)))
    prepared = arrays.prepared
    if arrays.bias is not None or drops((*block.parts, block.down), arrays.key) or block.down.tokens.shared:
        return None
    if (prepared is not None and prepared.rows is not None) or not served(x, inner) or not served(x, down):
        return None
    rows, products = flat(x), None
    if prepared is not None and isinstance(prepared.products, Addends):
        products = prepared.products.shares
    elif inner.rank:
        products = few_rows.rank_products(rows, inner)
    base, options = as_weight(arrays.gate_up).addends(rows), {"dtype": x.dtype}
    h, products = few_rows.gate(base, products, inner, down, activation=block.activation, **options)
    residual = None if residual is None else flat(residual)
    y = few_rows.add(as_weight(arrays.down).addends(h), products, down, residual, **options)
    return y.reshape(x.shape)


def _backward(block: Block, residuals, dy):
    x, gate_up, products, product_down, arrays, added = residuals
    down, matrices, gradients = block.down, arrays.matrices, {}
    inner = None if products is None else Inner(products, _inner_B(block, arrays, x.dtype))
    dropped = drops((down,), arrays.key)
    dproduct_down, down_A, dresidual = None, None, dy if added else None
    if down.rank:
        dproduct_down, dB_down = product_gradients((down,), dy, product_down, stacked_B((down,), matrices, dy.dtype))
        gradients[down.name] = None, dB_down[down.name]
        dproduct_down = down.tokens.all_of(dproduct_down)
        down_A = None if dropped else stacked_A((down,), matrices, dy.dtype)
    dy, below = down.tokens.all_of(dy), as_weight(arrays.down)
    dh: Any = below.transposed(dy) if dropped and down.rank else below.transposed_scaled(dy)
    # h again, for the gradients that the kernel does not make: an adapter's with a dropped input, and a weight's beside
    # adapters, mostly frozen and then unused. Without adapters the weights are trained, and it comes with dgate_up.
    trained = not block.adapted and not isinstance(arrays.down, Weight)
    h: Any = None if trained else _gate(block, gate_up, inner, None)[0]
    if dropped and dproduct_down is not None:
        dh, dA = rank_product_gradients((down,), matrices, dh, h, dproduct_down, arrays.key)
        gradients[down.name] = dA[down.name], gradients[down.name][1]
    inside = None
    if down_A is not None and dproduct_down is not None:
        inside = down_A, dproduct_down
    adapted = inner is not None and bool(with_adapter(block.parts))
    rounds = adapted and x.dtype == jnp.bfloat16 and as_weight(arrays.gate_up).reads_rounded(True)
    dgate_up, again, absmax, dB, dA = _ungate(block, gate_up, inner, dh, inside, with_h=trained, with_absmax=rounds)
    h = again if trained else h
    if dA is not None:
        gradients[down.name] = dA[: down.rank], gradients[down.name][1]
    dx, dinner = _through_gate_up(block, arrays, inner if adapted else None, dgate_up, absmax)
    dbias = prepared = None
    if inner is not None and dB is not None:
        dx, inner_gradients, prepared = _inner_gradients(block, dx, x, arrays, dinner, dB)
        gradients |= inner_gradients
        if arrays.bias is not None:
            column = max(part.rank for part in block.parts)
            dbias = dB[:, :, column].reshape(-1).astype(arrays.bias.dtype)
    dweight, ddown = as_weight(arrays.gate_up).gradient(dgate_up, x), as_weight(arrays.down).gradient(dy, h)
    return dx, dresidual, Operands(dweight, dbias, ddown, into_dtypes(gradients, matrices), None, prepared)  # pyright: ignore


_unit = unit(_forward, _backward, few=_few)


def _inner(block: Block, x, arrays: Operands) -> Inner | None:
    """The addends of gate and up: adapters and biases."""
    rank = block.inner_rank(arrays.bias is not None)
    if not rank:
        return None
    if arrays.prepared is not None:
        products = _widened(arrays.prepared.added(x.dtype), len(block.parts), rank)
    elif with_adapter(block.parts):
        products = rank_products(block.parts, arrays.matrices, x, arrays.key, rank)
    else:
        products = jnp.zeros((*x.shape[:-1], len(block.parts) * rank), x.dtype)
    products = chosen_products(block.parts, arrays.matrices, products)
    if arrays.bias is not None:
        column = max(part.rank for part in block.parts)
        one = (jnp.arange(products.shape[-1]) % rank == column).astype(products.dtype)
        products = products + one[None, None, :]
    return Inner(name_residual(products, "lora"), _inner_B(block, arrays, x.dtype))


def _inner_B(block: Block, arrays: Operands, dtype) -> Float[Array, "2 F R"]:
    """s·B of gate and of up, then the bias, then zeros up to a rank of the kernels."""
    rank = block.inner_rank(arrays.bias is not None)
    whole = stacked_B(block.parts, arrays.matrices, dtype, rank)
    if arrays.bias is not None:
        whole = whole.at[:, max(part.rank for part in block.parts)].set(arrays.bias.astype(dtype))
    return whole.reshape(2, block.features, rank)


def _through_gate_up(
    block: Block, arrays: Operands, inner: Inner | None, dgate_up, absmax
) -> tuple[Array, Array | None]:
    """The gradients of x through the large product, and of the rank products where there are adapters.

    Where the large product reads float8, rows are rounded in the pass that makes the rank products' gradient.
    """
    if inner is None:
        return as_weight(arrays.gate_up).transposed(dgate_up), None
    lora_B = inner.lora_B.reshape(-1, inner.lora_B.shape[-1])
    if absmax is None:
        stacked = block_matrix(lora_B, tuple(part.rows for part in block.parts))
        return as_weight(arrays.gate_up).transposed(dgate_up), linear(dgate_up, stacked.T)
    dproducts, rows = rounded_with_products(block.parts, dgate_up, absmax, lora_B)
    dx: Any = as_weight(arrays.gate_up).transposed_scaled(rows)  # pyright: ignore[reportArgumentType]
    return scaled_values(dx).astype(dgate_up.dtype), dproducts


def _inner_gradients(block: Block, dx, x, arrays: Operands, dproducts, dB):
    """The gradient of x by all ways, those of A and B of gate and up by name, and that of given products."""
    if not with_adapter(block.parts):
        return dx, {}, None
    sizes = tuple(part.rows for part in block.parts)
    if arrays.prepared is None:
        dx, dA = rank_product_gradients(block.parts, arrays.matrices, dx, x, dproducts, arrays.key)
        given = None
    else:
        dA = {part.name: jnp.zeros_like(arrays.matrices[part.name][0]) for part in with_adapter(block.parts)}
        given = PreparedRows(
            _narrowed(dproducts, len(sizes), arrays.prepared.added(x.dtype).shape[-1] // len(sizes)), None
        )
    dB = dB.reshape(len(sizes), -1, dB.shape[-1])
    gradients = {
        part.name: (dA[part.name], dB[number, :, : part.rank] * part.scaling)
        for number, part in enumerate(block.parts)
        if part.rank
    }
    return dx, gradients, given


def _widened(products: Array, parts: int, rank: int) -> Array:
    """Rank products with `rank` columns for each part; a bias may take more than the adapters."""
    width = products.shape[-1] // parts
    if width == rank:
        return products
    apart = products.reshape(*products.shape[:-1], parts, width)
    return jnp.pad(apart, ((0, 0), (0, 0), (0, 0), (0, rank - width))).reshape(*products.shape[:-1], parts * rank)


def _narrowed(products: Array, parts: int, rank: int) -> Array:
    """The way back from `_widened`."""
    apart = products.reshape(*products.shape[:-1], parts, -1)[..., :rank]
    return apart.reshape(*products.shape[:-1], parts * rank)


def _gate(block: Block, gate_up, inner: Inner | None, down_A, *, rounded: bool = False):
    """`glu_lora_forward` of [B, S, ...]."""

    def gate(gate_up, products, lora_B, down_A):
        adapters = None if products is None else Inner(products, lora_B)
        return glu_lora_forward(gate_up, adapters, down_A, activation=block.activation, rounded=rounded)

    products, lora_B = (None, None) if inner is None else inner
    return on_rows(gate, (gate_up, products), (lora_B, down_A))


def _ungate(block: Block, gate_up, inner: Inner | None, dh, down, *, with_h: bool, with_absmax: bool):
    """`glu_lora_backward` of [B, S, ...]."""

    def ungate(gate_up, products, dh, dproducts, lora_B, down_A):
        adapters = None if products is None else Inner(products, lora_B)
        below = None if down_A is None else (down_A, dproducts)
        options: Any = {"activation": block.activation, "with_h": with_h, "with_absmax": with_absmax}
        gradient, h, dB, dA, absmax = glu_lora_backward(gate_up, adapters, dh, below, **options)
        return gradient, h, absmax, dB, dA

    (products, lora_B), (down_A, dproducts) = ((None, None) if pair is None else pair for pair in (inner, down))
    return on_rows(ungate, (gate_up, products, dh, dproducts), (lora_B, down_A), sums=2)
