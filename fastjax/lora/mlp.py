"""A gated block with its adapters, down(act(gate(x)) · up(x)), as one differentiable unit.

    [gate | up] = x·Wᵀ          p = x·Aᵀ          h = act(gate + p·Bᵀ) · (up + p·Bᵀ)
    y = h·Vᵀ + (h·Cᵀ)·(s·D)ᵀ

The adapters of gate and up are applied where gate and up are read for h (`pallas_kernels.glu.lora`), without a pass
over arrays of that size; their biases are one more column of B, whose rank product is 1. The backward pass keeps x,
[gate | up] and the rank products. It makes the gradients of B and C where gate, up and h are in registers anyway, and
passes dh and [dgate | dup] on to the large products as they are. No dense B·A is formed and no decoded weight is
kept.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.rank_products import (
    Matrices,
    Part,
    drops,
    into_dtypes,
    over_tokens,
    rank_product_gradients,
    rank_products,
    scaled_B,
    with_adapter,
)
from fastjax.parallel import BATCH, local
from fastjax.quantization.weights import WeightLike, linear, matmul, matmul_transposed, weight_gradient
from fastjax.residuals import name_residual
from pallas_kernels.glu.lora import Inner, glu_lora_backward, glu_lora_forward, padded_rank


class Block(NamedTuple):
    """The static description of a gated block.

    Attributes:
        activation: Hugging Face's name of act.
        parts: gate and up, or one part of both.
        down: the projection back.
    """

    activation: str
    parts: tuple[Part, ...]
    down: Part

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


class Arrays(NamedTuple):
    """The unit's operands besides its input.

    Attributes:
        gate_up: [2F, E].
        bias: of gate and up, [2F], or None.
        down: [E, F].
        matrices: of the adapters.
        key: the layer's dropout key; None switches dropout off.
    """

    gate_up: WeightLike
    bias: Float[Array, " 2F"] | None
    down: WeightLike
    matrices: Matrices
    key: PRNGKeyArray | None


def gated_block(block: Block, x: Float[Array, "B S E"], arrays: Arrays) -> Float[Array, "B S E"]:
    """The block without the down projection's bias, in the dtype of x.

    Args:
        block: its description.
        x: the input, in the dtype of the computation.
        arrays: weights, adapters, key.
    """
    return _unit(block, x, arrays)  # pyright: ignore[reportReturnType]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unit(block: Block, x, arrays: Arrays):
    return _forward(block, x, arrays)[0]


def _forward(block: Block, x, arrays: Arrays):
    gate_up = name_residual(matmul(x, arrays.gate_up), "projection")
    inner = _inner(block, x, arrays)
    inside = block.down.rank and not drops((block.down,), arrays.key)
    h, product_down = _gate(block, gate_up, inner, _down_A(block, arrays, x.dtype) if inside else None)
    y = matmul(h, arrays.down)
    if block.down.rank:
        if product_down is None:
            product_down = rank_products((block.down,), arrays.matrices, h, arrays.key)
        product_down = name_residual(product_down[..., : block.down.rank], "lora")
        y = y + linear(product_down, scaled_B(block.down, arrays.matrices, x.dtype))
    products = None if inner is None else inner.products
    return y, (x, gate_up, products, product_down, arrays)


def _backward(block: Block, residuals, dy):
    x, gate_up, products, product_down, arrays = residuals
    down, matrices, gradients = block.down, arrays.matrices, {}
    inner = None if products is None else Inner(products, _inner_B(block, arrays, x.dtype))
    dropped = drops((down,), arrays.key)
    dproduct_down, down_A = None, None
    if down.rank:
        dproduct_down = linear(dy, scaled_B(down, matrices, dy.dtype).T)
        gradients[down.name] = None, over_tokens(dy, product_down) * down.scaling
        down_A = None if dropped else _down_A(block, arrays, dy.dtype)
    dh = matmul_transposed(dy, arrays.down)
    # h again, for the gradients that the kernel does not make: a plain weight's, unused where it is frozen, and an
    # adapter's with a dropped input.
    h, _ = _gate(block, gate_up, inner, None)
    if dropped and dproduct_down is not None:
        through, dA = rank_product_gradients((down,), matrices, h, dproduct_down, arrays.key)
        dh, gradients[down.name] = dh + through, (dA[down.name], gradients[down.name][1])
    inside = None
    if down_A is not None and dproduct_down is not None:
        inside = down_A, jnp.pad(dproduct_down, ((0, 0), (0, 0), (0, down_A.shape[0] - down.rank)))
    dgate_up, dB, dA = _ungate(block, gate_up, inner, dh, inside)
    if dA is not None:
        gradients[down.name] = dA[: down.rank], gradients[down.name][1]
    dx = matmul_transposed(dgate_up, arrays.gate_up)
    dbias = None
    if inner is not None and dB is not None:
        inner_gradients, through = _inner_gradients(block, x, arrays, inner, dgate_up, dB)
        gradients |= inner_gradients
        dx = dx if through is None else dx + through
        if arrays.bias is not None:
            column = max(part.rank for part in block.parts)
            dbias = dB[:, :, column].reshape(-1).astype(arrays.bias.dtype)
    dweight, ddown = weight_gradient(dgate_up, x, arrays.gate_up), weight_gradient(dy, h, arrays.down)
    return dx, Arrays(dweight, dbias, ddown, into_dtypes(gradients, matrices), None)  # pyright: ignore


_unit.defvjp(_forward, _backward)


def _shared(block: Block) -> bool:
    """Whether gate and up are one projection, with one rank product for both."""
    return len(block.parts) == 1


def _inner(block: Block, x, arrays: Arrays) -> Inner | None:
    """The addends of gate and up: adapters and biases."""
    rank = block.inner_rank(arrays.bias is not None)
    if not rank:
        return None
    whole = rank_products(block.parts, arrays.matrices, x, arrays.key) if with_adapter(block.parts) else None
    own, start = [], 0
    for part in block.parts:
        if whole is None:
            own.append(jnp.zeros((*x.shape[:-1], rank), x.dtype))
            continue
        mine = whole[..., start : start + part.rank]
        own.append(jnp.pad(mine, ((0, 0), (0, 0), (0, rank - part.rank))))
        start += part.rank
    products = own[0] if len(own) == 1 else jnp.concatenate(own, axis=-1)
    if arrays.bias is not None:
        column = max(part.rank for part in block.parts)
        one = (jnp.arange(products.shape[-1]) % rank == column).astype(products.dtype)
        products = products + one[None, None, :]
    return Inner(name_residual(products, "lora"), _inner_B(block, arrays, x.dtype))


def _inner_B(block: Block, arrays: Arrays, dtype) -> Float[Array, "2 F R"]:
    """s·B of gate and of up, then the bias, then zeros up to a rank of the kernels."""
    rank, widest = block.inner_rank(arrays.bias is not None), max(part.rank for part in block.parts)
    blocks = []
    for part in block.parts:
        if part.rank:
            b = scaled_B(part, arrays.matrices, dtype)
            blocks.append(jnp.pad(b, ((0, 0), (0, widest - part.rank))))
        else:
            blocks.append(jnp.zeros((part.rows, widest), dtype))
    whole = jnp.concatenate(blocks)
    if arrays.bias is not None:
        whole = jnp.concatenate([whole, arrays.bias.astype(dtype)[:, None]], axis=1)
    whole = jnp.pad(whole, ((0, 0), (0, rank - whole.shape[1])))
    return whole.reshape(2, block.features, rank)


def _inner_gradients(block: Block, x, arrays: Arrays, inner: Inner, dgate_up, dB):
    """The gradients of A and B of gate and up, by name, and of x through their rank products."""
    if not with_adapter(block.parts):
        return {}, None
    rank, features = inner.lora_B.shape[-1], block.features
    halves = inner.lora_B
    if _shared(block):
        stacked = halves.reshape(2 * features, rank)[:, : block.parts[0].rank]
        dB = dB.reshape(1, 2 * features, rank)
    else:
        left, right = (part.rank for part in block.parts)
        stacked = jnp.concatenate(
            [jnp.pad(halves[0, :, :left], ((0, 0), (0, right))), jnp.pad(halves[1, :, :right], ((0, 0), (left, 0)))]
        )
    dproducts = linear(dgate_up, stacked.T)
    dx, dA = rank_product_gradients(block.parts, arrays.matrices, x, dproducts, arrays.key)
    gradients = {
        part.name: (dA[part.name], dB[number, :, : part.rank] * part.scaling)
        for number, part in enumerate(block.parts)
        if part.rank
    }
    return gradients, dx


def _down_A(block: Block, arrays: Arrays, dtype) -> Float[Array, "R F"]:
    a, rank = arrays.matrices[block.down.name][0].astype(dtype), block.down.rank
    return jnp.pad(a, ((0, padded_rank(rank) - rank), (0, 0)))


def _gate(block: Block, gate_up, inner: Inner | None, down_A):
    """`glu_lora_forward` of [B, S, ...], on each device of its own rows."""

    def gate(gate_up, products, lora_B, down_A):
        own = None if products is None else Inner(_rows(products), lora_B)
        h, product_down = glu_lora_forward(_rows(gate_up), own, down_A, activation=block.activation)
        lead = gate_up.shape[:-1]
        return h.reshape(*lead, -1), None if product_down is None else product_down.reshape(*lead, -1)

    products, lora_B = (None, None) if inner is None else inner
    rows = P(BATCH)
    return local(gate, in_specs=(rows, rows, P(), P()), out_specs=(rows, rows))(gate_up, products, lora_B, down_A)


def _ungate(block: Block, gate_up, inner: Inner | None, dh, down):
    """`glu_lora_backward` of [B, S, ...], on each device of its own rows."""

    def ungate(gate_up, products, lora_B, dh, down_A, dproducts):
        own = None if products is None else Inner(_rows(products), lora_B)
        below = None if down_A is None else (down_A, _rows(dproducts))
        dgate_up, *sums = glu_lora_backward(_rows(gate_up), own, _rows(dh), below, activation=block.activation)
        return dgate_up.reshape(gate_up.shape), *(None if share is None else share[None] for share in sums)

    (products, lora_B), (down_A, dproducts) = ((None, None) if pair is None else pair for pair in (inner, down))
    rows = P(BATCH)
    island = local(ungate, in_specs=(rows, rows, P(), rows, P(), rows), out_specs=(rows, rows, rows))
    dgate_up, *shares = island(gate_up, products, lora_B, dh, down_A, dproducts)
    return dgate_up, *(None if share is None else jnp.sum(share, axis=0) for share in shares)


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])
