"""Adafactor's direction (Shazeer and Stern, arXiv 1804.04235), with the maths of transformers' `Adafactor`.

The second moment of a matrix is kept as the means of its rows and of its columns. The settings are those of
transformers' Trainer: no first moment, no relative step, no scaling by the parameter, decay 1 - t^-0.8, and the
direction clipped to a root mean square of 1. `optax.adafactor` differs where layers are stacked: it factors over the
two longest axes, one of which may be the layers, and clips all layers together.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fastjax.training.optimizers.groups import stack_dims

DECAY_EXPONENT = -0.8
EPSILON = 1e-30


class Factored(NamedTuple):
    """Means of the squared gradient of a matrix.

    Attributes:
        rows: float32 [*stack, out].
        columns: float32 [*stack, in].
    """

    rows: Float[Array, "*stack out"]
    columns: Float[Array, "*stack in"]

    def specs(self, spec: P, mesh: Mesh) -> "Factored":
        """The PartitionSpecs of the two for a matrix of this one.

        Args:
            spec: of the matrix.
            mesh: the mesh.
        """
        del mesh
        wanted = [*spec, *[None] * (self.rows.ndim + 1 - len(spec))]
        return Factored(P(*wanted[:-1]), P(*wanted[:-2], wanted[-1]))  # pyright: ignore[reportArgumentType]


class FactoredState(NamedTuple):
    """Second moments of the gradient.

    Attributes:
        count: updates made; int32 [].
        nu: a leaf is `Factored` for matrices, and for vectors a float32 array of their shape.
    """

    count: Int[Array, ""]
    nu: Any


def scale_by_factored_rms() -> optax.GradientTransformation:
    """The gradient over the root of its factored second moment, clipped to a root mean square of 1 a tensor.

    Returns:
        A transformation of float32 gradients into float32 directions.
    """

    def moment(path: tuple[Any, ...], leaf: Any) -> Any:
        if leaf.ndim - stack_dims(path, leaf) < 2:
            return jnp.zeros(leaf.shape, jnp.float32)
        columns = (*leaf.shape[:-2], leaf.shape[-1])
        return Factored(jnp.zeros(leaf.shape[:-1], jnp.float32), jnp.zeros(columns, jnp.float32))

    def init(params: Any) -> FactoredState:
        return FactoredState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(moment, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        decay = 1.0 - count.astype(jnp.float32) ** DECAY_EXPONENT

        def mean(before: Array, new: Array) -> Array:
            return decay * before + (1.0 - decay) * new

        def leaf(path: tuple[Any, ...], gradient: Float[Array, "..."], nu: Any) -> tuple[Array, Any]:
            square = gradient * gradient + EPSILON
            if isinstance(nu, Factored):
                rows, columns = mean(nu.rows, square.mean(-1)), mean(nu.columns, square.mean(-2))
                nu = Factored(rows, columns)
                rows = jax.lax.rsqrt(rows / rows.mean(-1, keepdims=True))
                direction = gradient * rows[..., None] * jax.lax.rsqrt(columns)[..., None, :]
            else:
                nu = mean(nu, square)
                direction = gradient * jax.lax.rsqrt(nu)
            axes = tuple(range(stack_dims(path, gradient), gradient.ndim))
            size = jnp.sqrt(jnp.mean(direction * direction, axis=axes, keepdims=True))
            return direction / jnp.maximum(size, 1.0), nu

        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        results = [leaf(path, g, nu) for (path, g), nu in zip(leaves, structure.flatten_up_to(state.nu), strict=True)]
        directions, nu = (structure.unflatten(column) for column in zip(*results, strict=True))
        return directions, FactoredState(count, nu)

    return optax.GradientTransformation(init, update)
