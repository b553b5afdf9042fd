"""The experts of a mixture with their adapters, from the routed tokens to their weighted sum, as one unit.

    [gate | up] = x·Wₓᵀ + (x·Aₓᵀ)·(s·Bₓ)ᵀ     h = act(gate) · up     y = h·Vₓᵀ + (h·Cₓᵀ)·(s·Dₓ)ᵀ     out = Σ w·y

Rows are sorted by expert, so that each product is one over groups (`pallas_kernels.grouped_matmul`); x is gathered in
the load and never copied for each expert. The backward pass keeps x, [gate | up] and the rank products. It makes h
again, and not y: the router's gradient ⟨dout, y⟩ is ⟨dout·V, h⟩, whose first factor is made anyway (SonicMoE, arXiv
2512.14080). Every gradient is gathered through the inverse of the sorted order. No dense B·A is formed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fastjax.lora.rank_products import Matrices, PartSpec, into_dtypes, scaled_B
from fastjax.lora.units import unit
from fastjax.parallel import BATCH, all_tokens, devices_along, local, own_sums
from fastjax.parallel.expert_dispatch import AXIS, Choices, own_choices
from fastjax.quantization.weights import WeightLike, as_weight
from fastjax.residuals import name_residual
from pallas_kernels import few_experts, routed_glu
from pallas_kernels.grouped_matmul import ZEROS_BEHIND, grouped_matmul, grouped_matmul_dw, grouped_matmul_dx
from pallas_kernels.moe_routing import Order, combine, sort_by_expert

#: Operands that lead with experts, and shares of their gradients, which lead with an axis of one.
EXPERTS = P("expert")
SHARES = P(tuple(axis for axis in BATCH if axis != "expert"), "expert")


class Clamp(NamedTuple):
    """The constants of `clamped_swiglu`."""

    limit: float
    alpha: float


class Block(NamedTuple):
    """The static description of the experts.

    Attributes:
        num_experts: X.
        activation: Hugging Face's name of act; unused with a clamp.
        clamp: of the activation, or None.
        gate_up: gate and up as one part of 2F rows.
        down: the projection back.
    """

    num_experts: int
    activation: str
    clamp: Clamp | None
    gate_up: PartSpec
    down: PartSpec

    @property
    def act(self) -> dict[str, Any]:
        """The activation, as kernels take it."""
        return {"activation": self.activation, "clamp": self.clamp}


class Operands(NamedTuple):
    """The unit's operands besides tokens and routing.

    Attributes:
        gate_up: [X, 2F, E].
        gate_up_bias: [X, 2F], or None.
        down: [X, E, F].
        down_bias: [X, E], or None.
        matrices: A [X, R, in] and B [X, out, R] of the adapters.
    """

    gate_up: WeightLike
    gate_up_bias: Float[Array, "X 2F"] | None
    down: WeightLike
    down_bias: Float[Array, "X E"] | None
    matrices: Matrices


class _Saved(NamedTuple):
    """Residuals of the forward pass, each device's own; `group_sizes` of the order leads with the device.

    Attributes:
        order: of the pairs.
        gate_up: [M, 2F].
        inner: x·Aᵀ of gate and up, [M, R], or None.
        outer: h·Cᵀ of down, [M, R], or None.
        choices: of all tokens that came to the device; None on one device.
        tokens: these [T, E]; None on one device.
    """

    order: Order
    gate_up: Array
    inner: Array | None
    outer: Array | None
    choices: Choices | None
    tokens: Array | None


def routed_experts(
    block: Block,
    x: Float[Array, "N E"],
    weights: Float[Array, "N k"],
    experts: Int[Array, "N k"],
    arrays: Operands,
    items: few_experts.Items | None = None,
) -> Float[Array, "N E"]:
    """The weighted sum of each token's experts, in the dtype of x.

    Args:
        block: their description.
        x: tokens, in the dtype of the computation.
        weights: of each token's experts.
        experts: of each token, k different ones.
        arrays: weights and adapters.
        items: of the routing, where they are there already.

    Returns:
        The sums. Differentiable in x, the weights, adapters, biases and plain weights.
    """
    return _unit(block, x, weights, experts, arrays, items)


def _forward(block: Block, x, weights, experts, arrays: Operands, items):
    rows = P(BATCH)
    island = local(functools.partial(_products, block), in_specs=(rows, rows, rows, EXPERTS), out_specs=rows)
    out, saved = island(x, weights, experts, arrays)
    named = {"gate_up": "projection", "inner": "lora", "outer": "lora", "choices": "gathered", "tokens": "gathered"}
    saved = saved._replace(
        **{
            field: jax.tree.map(functools.partial(name_residual, name=name), getattr(saved, field))
            for field, name in named.items()
        }
    )
    own = (x, weights, experts) if saved.choices is None else (None, None, None)
    return out, (*own, saved, arrays)


def _backward(block: Block, residuals, dout):
    x, weights, experts, saved, arrays = residuals
    rows = P(BATCH)
    island = local(
        functools.partial(_gradients, block),
        in_specs=(rows, rows, rows, rows, EXPERTS, rows),
        out_specs=(rows, rows, SHARES),
    )
    dx, dweights, shares = island(x, weights, experts, saved, arrays, dout)
    return dx, dweights, None, jax.tree.map(lambda share: share.sum(0).astype(share.dtype), shares), None


def _few(block: Block, x, weights, experts, arrays: Operands, items):
    if why_not_where_they_lie(block, x, arrays) is None:
        items = few_experts.items_of(experts, block.num_experts) if items is None else items
        return _where_they_lie(block, x, weights, experts, arrays, items)
    pairs, mesh = experts.size, jax.sharding.get_abstract_mesh()
    if 2 * pairs > block.num_experts or (not mesh.empty and mesh.size > 1):
        return None
    # Every pair has its expert to itself: the other experts, most of them, are neither read nor prepared.
    own = jax.tree.map(lambda leaf: leaf[experts.reshape(-1)], arrays)
    numbers = jnp.arange(pairs, dtype=experts.dtype).reshape(experts.shape)
    return _products(block._replace(num_experts=pairs), x, weights, numbers, own)[0]


def why_not_where_they_lie(block: Block, x: Float[Array, "N E"], arrays: Operands) -> str | None:
    """Why the kernels for a few tokens (`few_experts`) do not serve a call, as a clause; None: they do.

    Args:
        block: the experts' description.
        x: tokens.
        arrays: weights and adapters.
    """
    rank, weights = max(block.gate_up.rank, block.down.rank), (arrays.gate_up, arrays.down)
    if reason := few_experts.why_not(len(x), x.dtype, rank, x.shape[1], block.gate_up.rows // 2, block.down.rows):
        return reason
    return next(filter(None, (as_weight(weight).why_not_items(x.dtype) for weight in weights)), None)


def _where_they_lie(block: Block, x, weights, experts, arrays: Operands, items: few_experts.Items) -> Array:
    """The result by kernels that read the chosen experts among all: no sort, no gather, no padding."""
    inner, outer = (_adapter(part, arrays) for part in (block.gate_up, block.down))
    pairs, products = experts.size, None
    if inner is not None:
        products = few_experts.rank_products(x, inner, items, pairs)
    base = as_weight(arrays.gate_up).matmul_items(x, items, pairs)
    h, products = few_experts.gate(base, products, inner, arrays.gate_up_bias, outer, items, **block.act)
    y = as_weight(arrays.down).matmul_items(h, items, pairs)
    return few_experts.combine(y, products, outer, arrays.down_bias, weights, experts)


def _adapter(part: PartSpec, arrays: Operands) -> few_experts.Adapter | None:
    if not part.rank:
        return None
    lora_A, lora_B, *_ = arrays.matrices[part.name]
    return few_experts.Adapter(lora_A, lora_B, part.scaling)


_unit = unit(_forward, _backward, few=_few)


def _products(block: Block, x, weights, experts, arrays: Operands) -> tuple[Array, _Saved]:
    """The sums of one device's tokens, and what it keeps of all tokens' choices among its own experts."""
    devices = devices_along(AXIS)
    own, apart = block.num_experts // devices, devices > 1
    choices, x = own_choices(experts, weights, own), all_tokens(x, along=AXIS)
    order = sort_by_expert(choices.experts, own, absent=apart)
    sizes = order.group_sizes
    expert = _expert_of_rows(choices, order)
    inner, low_rank = _rank_products(block.gate_up, arrays, x, sizes, order.rows)
    gate_up = as_weight(arrays.gate_up).grouped_matmul(x, sizes, rows=order.rows, low_rank=low_rank)
    gate_up = _biased(gate_up, arrays.gate_up_bias, expert)
    h = routed_glu.routed_glu(gate_up, _computed(sizes), **block.act)
    outer, low_rank = _rank_products(block.down, arrays, h, sizes)
    y = as_weight(arrays.down).grouped_matmul(h, sizes, low_rank=low_rank)
    out = combine(_biased(y, arrays.down_bias, expert), choices.weights, order)
    came = (choices, x) if apart else (None, None)
    return own_sums(out, along=AXIS), _Saved(order._replace(group_sizes=sizes[None]), gate_up, inner, outer, *came)


def _computed(sizes: Int[Array, " X"]) -> Int[Array, ""]:
    """The rows of pairs that are here, and those behind that products over groups read too."""
    return jnp.sum(sizes) + ZEROS_BEHIND


def _rank_products(part: PartSpec, arrays: Operands, x, sizes, rows=None):
    """x·Aᵀ of a part, and beside it s·B as products over groups take them; None and None without an adapter."""
    if not part.rank:
        return None, None
    a, b = _scaled(part, arrays, x.dtype)
    products = grouped_matmul(x, a, sizes, rows=rows)
    return products, (products, b)


def _gradients(block: Block, x, weights, experts, saved: _Saved, arrays: Operands, dout):
    """The gradients of one device's tokens, and the shares of its arrays' gradients, each led by an axis of one."""
    several, choices = saved.choices is not None, saved.choices or Choices(experts, weights)
    x = x if saved.tokens is None else saved.tokens
    order, dout, dtype, matrices = saved.order, all_tokens(dout, along=AXIS), x.dtype, {}
    sizes = order.group_sizes[0]
    expert = _expert_of_rows(choices, order)
    weight = choices.weights.reshape(-1)[order.order].astype(jnp.float32)  # of each sorted row

    def weighted(array: Array) -> Array:
        return (array.astype(jnp.float32) * weight[:, None]).astype(dtype)

    # dy = dout[order.rows] is gathered in the loads: before the weights, as the router's gradient needs it.
    low_rank, douter = None, None
    if saved.outer is not None:
        a, b = _scaled(block.down, arrays, dtype)
        douter = grouped_matmul_dx(dout, b, sizes, rows=order.rows)
        low_rank = (douter, a)
    dh = as_weight(arrays.down).grouped_transposed(dout, sizes, rows=order.rows, low_rank=low_rank)
    h, dgate_up, dweight = routed_glu.gradients(saved.gate_up, dh, weight, _computed(sizes), **block.act)
    if saved.outer is not None and douter is not None:
        matrices[block.down.name] = (
            grouped_matmul_dw(weighted(douter), h, sizes, dtype=jnp.float32),
            grouped_matmul_dw(weighted(saved.outer), dout, sizes, rows=order.rows, dtype=jnp.float32).swapaxes(1, 2)
            * block.down.scaling,
        )
    dy = dout[order.rows]
    if arrays.down_bias is not None:
        bias = arrays.down_bias.astype(dtype)[expert]
        dweight = dweight + jnp.sum(dy.astype(jnp.float32) * bias.astype(jnp.float32), axis=1)
    low_rank = None
    if saved.inner is not None:
        a, b = _scaled(block.gate_up, arrays, dtype)
        dinner = grouped_matmul_dx(dgate_up, b, sizes)
        low_rank = (dinner, a)
        matrices[block.gate_up.name] = (
            grouped_matmul_dw(dinner, x, sizes, rows=order.rows, dtype=jnp.float32),
            grouped_matmul_dw(dgate_up, saved.inner, sizes, dtype=jnp.float32) * block.gate_up.scaling,
        )
    dx = as_weight(arrays.gate_up).grouped_transposed(dgate_up, sizes, low_rank=low_rank)
    shares = Operands(
        as_weight(arrays.gate_up).grouped_gradient(dgate_up, x, sizes, order.rows),
        _bias_gradient(arrays.gate_up_bias, dgate_up, expert, several),
        as_weight(arrays.down).grouped_gradient(dy, weighted(h), sizes),
        _bias_gradient(arrays.down_bias, weighted(dy), expert, several),
        into_dtypes(matrices, arrays.matrices),
    )
    # Apart from what is added to it: fused with the router's share, XLA's kernel reads half as fast.
    dx = jax.lax.optimization_barrier(jnp.sum(dx[order.inverse].astype(jnp.float32), axis=1).astype(dtype))
    dweights = dweight[order.inverse].astype(choices.weights.dtype)
    if several:  # of pairs that lie elsewhere another device knows it
        dweights = own_sums(jnp.where(choices.experts < len(sizes), dweights, 0), along=AXIS)
    return own_sums(dx, along=AXIS), dweights, jax.tree.map(lambda share: share[None], shares)


def _scaled(
    part: PartSpec, arrays: Operands, dtype: jnp.dtype
) -> tuple[Float[Array, "X R in"], Float[Array, "X out R"]]:
    """A and s·B of a part in the dtype of the computation."""
    return arrays.matrices[part.name][0].astype(dtype), scaled_B(part, arrays.matrices, dtype)


def _expert_of_rows(choices: Choices, order: Order) -> Int[Array, " M"]:
    return choices.experts.reshape(-1)[order.order]


def _biased(y: Float[Array, "M out"], bias: Float[Array, "X out"] | None, expert: Int[Array, " M"]) -> Array:
    return y if bias is None else y + bias.astype(y.dtype)[expert]


def _bias_gradient(
    bias: Array | None, dy: Float[Array, "M out"], expert: Int[Array, " M"], several: bool
) -> Array | None:
    """The sums of dy over each expert's rows, as a product with its indicator; `several`: some rows have no expert."""
    if bias is None:
        return None
    if several:  # what lies behind the groups may be no number
        dy = jnp.where((expert < bias.shape[0])[:, None], dy, 0)
    here = (jnp.arange(bias.shape[0], dtype=expert.dtype)[:, None] == expert[None, :]).astype(dy.dtype)
    precision = jax.lax.Precision.HIGHEST if dy.dtype == jnp.float32 else None
    return jnp.matmul(here, dy, precision=precision, preferred_element_type=jnp.float32).astype(bias.dtype)
