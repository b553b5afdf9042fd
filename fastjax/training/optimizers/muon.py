"""Muon's direction (Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024).

A matrix's Nesterov momentum is brought near the closest orthogonal matrix by a Newton-Schulz iteration, which takes
every singular value to about 1. Scaled by 0.2·√max(out, in), an update has the root mean square of AdamW's (Liu et al.,
"Muon is Scalable for LLM Training", arXiv 2502.16982), so that the learning rates and weight decay of AdamW serve.
Embeddings, head and vectors are AdamW's. The maths is `optax.contrib.muon`'s with `consistent_rms=0.2`; here a stack's
layers are taken one after the other, whose intermediate products thus take the memory of one.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fastjax.models.leaves import leaf_at
from fastjax.training.optimizers.adam import AdamState, one_minus_power, scale_by_adam
from fastjax.training.optimizers.groups import stack_dims

#: Of the quintic a·x + b·x³ + c·x⁵, with a steep slope at 0: after `STEPS` times singular values lie about 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
RMS = 0.2
EPSILON = 1e-8


class MuonState(NamedTuple):
    """Momentum of the matrices, and what AdamW holds of the rest.

    Attributes:
        mu: mean of the gradient; a leaf is a float32 array, or None where AdamW has the weight.
        adam: of the other weights, None in the place of matrices; its count is that of all updates.
    """

    mu: Any
    adam: AdamState


def scale_by_muon(momentum: float, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Orthogonalised momentum of matrices in layers, adapters' factors among them, and AdamW's direction of the rest.

    Args:
        momentum: decay of the mean of a matrix's gradient.
        b1: AdamW's decay of the first mean.
        b2: its decay of the second mean.
        eps: added to its root.

    Returns:
        A transformation of float32 gradients into float32 directions.
    """
    adam = scale_by_adam(b1, b2, eps, bits=32)

    def split(tree: Any) -> tuple[Any, Any]:
        def only(matrices: bool) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: leaf if _is_matrix(path, leaf) == matrices else None, tree
            )

        return only(True), only(False)

    def init(params: Any) -> MuonState:
        matrices, rest = split(params)
        held: Any = adam.init(rest)
        return MuonState(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), matrices), held)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        matrices, rest = split(updates)
        after: Any
        directions, after = adam.update(rest, state.adam)
        mu = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.mu, matrices)
        orthogonal = jax.tree.map(lambda m, g: _direction(m, g, momentum, after.count), mu, matrices)
        merged = jax.tree.map(
            lambda a, b: b if a is None else a, orthogonal, directions, is_leaf=lambda leaf: leaf is None
        )
        return merged, MuonState(mu, after)

    return optax.GradientTransformation(init, update)


def orthogonalized(matrix: Float[Array, "*X M N"]) -> Float[Array, "*X M N"]:
    """The iteration's result for matrices of at least two axes, each for itself.

    The products are in TF32 on a GPU that has it; the iteration corrects what it is fed, and its end is no exact one.

    Args:
        matrix: of any norm.
    """

    def product(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=jax.lax.Precision.DEFAULT)

    tall = matrix.shape[-2] > matrix.shape[-1]
    x = jnp.swapaxes(matrix, -1, -2) if tall else matrix  # the products are squares of the shorter side
    x = x / (jnp.sqrt(jnp.sum(x * x, (-2, -1), keepdims=True)) + EPSILON)
    for _ in range(STEPS):
        a, b, c = COEFFICIENTS
        square = product(x, jnp.swapaxes(x, -1, -2))
        x = a * x + product(b * square + c * product(square, square), x)
    return jnp.swapaxes(x, -1, -2) if tall else x


def _direction(
    mu: Float[Array, "... M N"], gradient: Float[Array, "... M N"], momentum: float, count: Int[Array, ""]
) -> Float[Array, "... M N"]:
    """The scaled direction, layer after layer."""
    ahead = momentum / one_minus_power(momentum, count + 1)
    now = (1 - momentum) / one_minus_power(momentum, count)
    scale = RMS * math.sqrt(max(mu.shape[-2:]))

    def one(parts: tuple[Array, Array]) -> Array:
        return scale * orthogonalized(ahead * parts[0] + now * parts[1])

    return one((mu, gradient)) if mu.ndim == 2 else jax.lax.map(one, (mu, gradient))


def _is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    described = leaf_at(path)
    if described.of_table or described.is_vector or described.kind == "score":
        return False
    return leaf.ndim - stack_dims(path, leaf) == 2
