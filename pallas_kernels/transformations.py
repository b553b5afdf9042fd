"""Support for JAX's transformations of the operations: shard_map, meshes with explicit axes, export.

docs/api/kernels.md says which operation takes which.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec


def custom_vjp(function: Callable[..., Any] | None = None, *, nondiff_argnums: Sequence[int] = ()) -> Any:
    """`jax.custom_vjp` whose operands all vary over the devices over which one of them does, in a checked shard_map.

    A gradient varies over the devices as its operands do, and must vary as the operand that it is of: of one that all
    devices share it is the sum over them. That sum is the transpose of the operand's turn into one that varies.

    Args:
        function: the operation; None: a decorator is wanted.
        nondiff_argnums: as of `jax.custom_vjp`.
    """
    if function is None:
        return functools.partial(custom_vjp, nondiff_argnums=nondiff_argnums)
    operation = jax.custom_vjp(function, nondiff_argnums=tuple(nondiff_argnums))

    @functools.wraps(function)
    def varying(*arguments: Any) -> Any:
        places = [place for place in range(len(arguments)) if place not in nondiff_argnums]
        alike = dict(zip(places, _varying_alike([arguments[place] for place in places]), strict=True))
        return operation(*(alike.get(place, argument) for place, argument in enumerate(arguments)))

    varying.defvjp = operation.defvjp  # pyright: ignore[reportAttributeAccessIssue]
    return varying


def _varying_alike(operands: list[Any]) -> list[Any]:
    leaves, tree = jax.tree.flatten(operands)
    over = [jax.typeof(leaf).mat.varying for leaf in leaves]  # pyright: ignore[reportAttributeAccessIssue]
    every = frozenset().union(*over)
    if every:
        missing = [tuple(sorted(every - own)) for own in over]
        pairs = zip(leaves, missing, strict=True)
        leaves = [jax.lax.pcast(leaf, axes, to="varying") if axes else leaf for leaf, axes in pairs]
    return tree.unflatten(leaves)


def with_automatic_axes(function: Callable[..., Any], *operands: Any, rows_like: Any) -> Any:
    """The operation, with a mesh's explicit axes left to the compiler inside of it.

    Sums over split rows, sorts and searches along them have no sharding that JAX would infer on explicit axes.

    Args:
        function: of the operands alone.
        operands: trees of arrays.
        rows_like: for each result, as a prefix of their tree, the array as whose leading axis its own is split; None:
            it is whole on every device, as are all results along their other axes.
    """
    own = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands)]  # pyright: ignore[reportAttributeAccessIssue]
    mesh = next(
        (mesh for mesh in (jax.sharding.get_abstract_mesh(), *own) if AxisType.Explicit in mesh.axis_types), None
    )
    if mesh is None:
        return function(*operands)
    places = jax.tree.map(
        lambda array: PartitionSpec() if array is None else PartitionSpec(*jax.typeof(array).sharding.spec[:1]),  # pyright: ignore[reportAttributeAccessIssue]
        rows_like,
        is_leaf=lambda array: array is None,
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.auto_axes(function, out_sharding=places)(*operands)


def number(op: str, name: str, value: Any) -> float:
    """A number of an operation that its program is made for.

    Args:
        op: the operation's name, for the message.
        name: the argument's.
        value: a number or an array of one.

    Raises:
        TypeError: it is traced.
    """
    if isinstance(value, Tracer):
        raise TypeError(
            f"{op}: {name} must be known while the function is traced, got a traced {value.aval.str_short()}: pass a "
            "number that no transformation maps or differentiates, in jax.jit by static_argnames"
        )
    return float(value)


def known(size: Any, instead: float) -> float:
    """A dimension to plan by.

    Args:
        size: a number, or a symbolic dimension of `jax.export`.
        instead: the answer for a symbolic one.
    """
    return instead if jax.export.is_symbolic_dim(size) else size
