"""Arrays of zeros, to be filled or added to."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def zeros(shapes: Any) -> Any:
    """A buffer of zeros for each shape, all by one program: one for each would be compiled for seconds in all.

    Args:
        shapes: a tree of `jax.ShapeDtypeStruct`, each with its sharding or without, and of None, which stays.

    Returns:
        The tree of arrays; none shares its memory with another.
    """
    leaves, structure = jax.tree.flatten(shapes)
    return structure.unflatten(_program(tuple(leaves))())


@functools.lru_cache(maxsize=256)
def _program(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[], list[Array]]:
    return jax.jit(
        lambda: [jnp.zeros(shape.shape, shape.dtype) for shape in shapes],
        out_shardings=[shape.sharding for shape in shapes],
    )
