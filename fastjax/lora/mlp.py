"""A gated block with its adapters, down(act(gate(x)) · up(x)), as one differentiable unit.

    [gate | up] = x·Wᵀ          thin = x·Aᵀ          h = act(gate + thin·Bᵀ) · (up + thin·Bᵀ)
    y = h·Vᵀ + (h·Cᵀ)·(s·D)ᵀ

The adapters of gate and up are applied where gate and up are read for h (`pallas_kernels.glu.lora`), so that no pass
over arrays of that size is made for them; their biases are one more column of B, whose thin product is 1. The backward
pass keeps x, [gate | up] and the thin products. It makes the gradients of B and C where gate, up and h are in registers
anyway, and passes dh and [dgate | dup] on to the large products as they are. No dense B·A is formed and no decoded
weight is kept.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.thin import (
    Matrices,
    Part,
    adapted,
    drops,
    into_dtypes,
    over_tokens,
    scaled_B,
    thin_gradients,
    thin_products,
)
from fastjax.parallel import BATCH, local
from fastjax.quantization.weights import WeightLike, linear, matmul, matmul_transposed, weight_gradient
from fastjax.residuals import keep
from pallas_kernels.glu.lora import Inner, glu_lora_backward, glu_lora_forward, padded_rank


class Block(NamedTuple):
    """What is known of a gated block while tracing.

    Attributes:
        activation: Hugging Face's name of act.
        parts: gate and up, or one that is both.
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
        """Columns of B before `glu.lora`, of gate as of up; 0: there is nothing to add.

        Args:
            bias: whether there is a bias.
        """
        widest = max(part.rank for part in self.parts) + bias
        return padded_rank(widest) if widest else 0


class Arrays(NamedTuple):
    """What the unit computes with, besides its input.

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
        block: its parts.
        x: the input, in the dtype of the computation.
        arrays: weights, adapters, key.
    """
    return _unit(block, x, arrays)  # pyright: ignore[reportReturnType]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unit(block: Block, x, arrays: Arrays):
    return _forward(block, x, arrays)[0]


def _forward(block: Block, x, arrays: Arrays):
    both = keep(matmul(x, arrays.gate_up), "projection")
    inner = _inner(block, x, arrays)
    inside = block.down.rank and not drops((block.down,), arrays.key)
    h, thin_down = _gate(block, both, inner, _down_A(block, arrays, x.dtype) if inside else None)
    y = matmul(h, arrays.down)
    if block.down.rank:
        if thin_down is None:
            thin_down = thin_products((block.down,), arrays.matrices, h, arrays.key)
        thin_down = keep(thin_down[..., : block.down.rank], "lora")
        y = y + linear(thin_down, scaled_B(block.down, arrays.matrices, x.dtype))
    thin = None if inner is None else inner.products
    return y, (x, both, thin, thin_down, arrays)


def _backward(block: Block, residuals, dy):
    x, both, thin, thin_down, arrays = residuals
    down, matrices, gradients = block.down, arrays.matrices, {}
    inner = None if thin is None else Inner(thin, _inner_B(block, arrays, x.dtype))
    dropped = drops((down,), arrays.key)
    dthin_down, down_A = None, None
    if down.rank:
        dthin_down = linear(dy, scaled_B(down, matrices, dy.dtype).T)
        gradients[down.name] = None, over_tokens(dy, thin_down) * down.scaling
        down_A = None if dropped else _down_A(block, arrays, dy.dtype)
    dh = matmul_transposed(dy, arrays.down)
    # h again, for what the kernel does not make: gradients of a plain weight, which go where no one asks for them, and
    # of an adapter whose input was dropped.
    h, _ = _gate(block, both, inner, None)
    if dropped and dthin_down is not None:
        through, dA = thin_gradients((down,), matrices, h, dthin_down, arrays.key)
        dh, gradients[down.name] = dh + through, (dA[down.name], gradients[down.name][1])
    inside = None
    if down_A is not None and dthin_down is not None:
        inside = down_A, jnp.pad(dthin_down, ((0, 0), (0, 0), (0, down_A.shape[0] - down.rank)))
    dboth, dB, dA = _ungate(block, both, inner, dh, inside)
    if dA is not None:
        gradients[down.name] = dA[: down.rank], gradients[down.name][1]
    dx = matmul_transposed(dboth, arrays.gate_up)
    dbias = None
    if inner is not None and dB is not None:
        inner_gradients, through = _inner_gradients(block, x, arrays, inner, dboth, dB)
        gradients |= inner_gradients
        dx = dx if through is None else dx + through
        if arrays.bias is not None:
            column = max(part.rank for part in block.parts)
            dbias = dB[:, :, column].reshape(-1).astype(arrays.bias.dtype)
    dgate_up, ddown = weight_gradient(dboth, x, arrays.gate_up), weight_gradient(dy, h, arrays.down)
    return dx, Arrays(dgate_up, dbias, ddown, into_dtypes(gradients, matrices), None)  # pyright: ignore


_unit.defvjp(_forward, _backward)


def _shared(block: Block) -> bool:
    """Whether gate and up are one projection, with one thin product for both."""
    return len(block.parts) == 1


def _inner(block: Block, x, arrays: Arrays) -> Inner | None:
    """What is added to gate and up: adapters, and biases."""
    rank = block.inner_rank(arrays.bias is not None)
    if not rank:
        return None
    thins = []
    products = thin_products(block.parts, arrays.matrices, x, arrays.key) if adapted(block.parts) else None
    start = 0
    for part in block.parts:
        if products is None:
            thin = jnp.zeros((*x.shape[:-1], rank), x.dtype)
        else:
            thin = products[..., start : start + part.rank]
            thin = jnp.pad(thin, ((0, 0), (0, 0), (0, rank - part.rank)))
            start += part.rank
        thins.append(thin)
    thin = thins[0] if len(thins) == 1 else jnp.concatenate(thins, axis=-1)
    if arrays.bias is not None:
        column = max(part.rank for part in block.parts)
        one = (jnp.arange(thin.shape[-1]) % rank == column).astype(thin.dtype)
        thin = thin + one[None, None, :]
    return Inner(keep(thin, "lora"), _inner_B(block, arrays, x.dtype))


def _inner_B(block: Block, arrays: Arrays, dtype) -> Float[Array, "2 F R"]:
    """s·B of gate and of up, with the bias behind, and zeros up to the rank that kernels serve."""
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


def _inner_gradients(block: Block, x, arrays: Arrays, inner: Inner, dboth, dB):
    """The gradients of A and B of gate and up, by name, and what their thin products pass back to x."""
    if not adapted(block.parts):
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
    dthin = linear(dboth, stacked.T)
    dx, dA = thin_gradients(block.parts, arrays.matrices, x, dthin, arrays.key)
    gradients = {
        part.name: (dA[part.name], dB[number, :, : part.rank] * part.scaling)
        for number, part in enumerate(block.parts)
        if part.rank
    }
    return gradients, dx


def _down_A(block: Block, arrays: Arrays, dtype) -> Float[Array, "R F"]:
    a, rank = arrays.matrices[block.down.name][0].astype(dtype), block.down.rank
    return jnp.pad(a, ((0, padded_rank(rank) - rank), (0, 0)))


def _gate(block: Block, both, inner: Inner | None, down_A):
    """`glu_lora_forward` of [B, S, ...], on each device of its own rows."""

    def gate(both, thin, lora_B, down_A):
        given = None if thin is None else Inner(_rows(thin), lora_B)
        h, thin_down = glu_lora_forward(_rows(both), given, down_A, activation=block.activation)
        lead = both.shape[:-1]
        return h.reshape(*lead, -1), None if thin_down is None else thin_down.reshape(*lead, -1)

    thin, lora_B = (None, None) if inner is None else inner
    rows = P(BATCH)
    return local(gate, in_specs=(rows, rows, P(), P()), out_specs=(rows, rows))(both, thin, lora_B, down_A)


def _ungate(block: Block, both, inner: Inner | None, dh, down):
    """`glu_lora_backward` of [B, S, ...], on each device of its own rows."""

    def ungate(both, thin, lora_B, dh, down_A, dthin):
        given = None if thin is None else Inner(_rows(thin), lora_B)
        below = None if down_A is None else (down_A, _rows(dthin))
        dboth, *sums = glu_lora_backward(_rows(both), given, _rows(dh), below, activation=block.activation)
        return dboth.reshape(both.shape), *(None if share is None else share[None] for share in sums)

    (thin, lora_B), (down_A, dthin) = ((None, None) if pair is None else pair for pair in (inner, down))
    rows = P(BATCH)
    island = local(ungate, in_specs=(rows, rows, P(), rows, P(), rows), out_specs=(rows, rows, rows))
    dboth, *shares = island(both, thin, lora_B, dh, down_A, dthin)
    return dboth, *(None if share is None else jnp.sum(share, axis=0) for share in shares)


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])
