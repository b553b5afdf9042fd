"""A head applied to a sequence chunk by chunk: the checks, the scan and the rows that the operations share.

The chunks are cut along the sequence, so the batch axis keeps its sharding.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels.cross_entropy import triton, xla
from pallas_kernels.cross_entropy.reference import IGNORE_INDEX
from pallas_kernels.cross_entropy.rows import Options
from pallas_kernels.dispatch import FLOATS, Implementation, Target, triton_or_xla
from pallas_kernels.transformations import number

Project = Callable[[Any, Any, Float[Array, "B C E"]], Float[Array, "B C V"]]


class HeadCall(NamedTuple):
    """The static part of a call of an operation.

    Attributes:
        project: the head.
        chunk_size: positions a row and chunk.
        options: of the rows.
        implementation: of the rows; None: the preferred one.
    """

    project: Project
    chunk_size: int
    options: Options
    implementation: str | None


def checked_call(
    name: str,
    project: Project,
    trainable: PyTree,
    hidden: Float[Array, "B S E"],
    targets: Int[Array, "B S"],
    chunk_size: int,
    options: Options,
    implementation: str | None,
) -> HeadCall:
    """The call of an operation, if its arguments fit.

    Args:
        name: of the operation, for the errors.
        project: the head.
        trainable: the head's differentiated arrays.
        hidden: the decoder's last activations.
        targets: index of the right word at each position.
        chunk_size: positions a chunk.
        options: of the rows.
        implementation: of the rows.

    Raises:
        ValueError: shapes that do not fit, a number out of range, or a trainable leaf that is not floating-point.
    """
    if hidden.ndim != 3 or targets.shape != hidden.shape[:2] or not hidden.shape[1]:
        raise ValueError(
            f"{name}: hidden must be [batch, length, width] with length >= 1 and targets "
            f"[batch, length], got {hidden.shape} and {targets.shape}"
        )
    if chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be at least 1, got {chunk_size}")
    names = ("label_smoothing", "z_loss", "logits_scale", "logits_soft_cap")
    given = zip(names, options, strict=True)
    options = Options(*(None if value is None else number(name, key, value) for key, value in given))  # pyright: ignore[reportArgumentType]
    if not 0 <= options.label_smoothing < 1 or not options.z_loss >= 0:
        raise ValueError(
            f"{name}: label_smoothing must be in [0, 1) and z_loss at least 0, got "
            f"{options.label_smoothing} and {options.z_loss}"
        )
    if not options.scale > 0 or (options.soft_cap is not None and not options.soft_cap > 0):
        raise ValueError(
            f"{name}: logits_scale and logits_soft_cap must be greater than 0, got "
            f"{options.scale} and {options.soft_cap}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainable):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{name}: trainable leaves must be floating-point, got "
                f"{leaf.dtype} at {jax.tree_util.keystr(path) or 'the root'}; pass it in frozen"
            )
    return HeadCall(project, min(chunk_size, hidden.shape[1]), options, implementation)


def scan_chunks(
    call: HeadCall, step: Callable[..., tuple[Any, Any]], carry: Any, hidden: Array, targets: Array, *others: Array
) -> tuple[Any, Any]:
    """`lax.scan` over a sequence's chunks.

    Args:
        call: the static part.
        step: (carry, start, a chunk of hidden, of targets and of each other array) -> (carry, result).
        carry: the first.
        hidden: [B, S, E].
        targets: [B, S]; those of the positions that fill the last chunk are ``IGNORE_INDEX``.
        others: [B, S, …], filled up with zeros.

    Returns:
        The last carry and the stacked results.
    """
    size = call.chunk_size
    arrays = _pad(hidden, size), _pad(targets, size, IGNORE_INDEX), *(_pad(array, size) for array in others)

    def body(carry: Any, start: Array) -> tuple[Any, Any]:
        pieces = (lax.dynamic_slice_in_dim(array, start, size, axis=1) for array in arrays)
        return step(carry, start, *pieces)

    return lax.scan(body, carry, jnp.arange(0, arrays[0].shape[1], size, dtype=jnp.int32))


def zeros_in_chunks(call: HeadCall, hidden: Float[Array, "B S E"]) -> Float[Array, "B P E"]:
    """Room for the gradient of hidden in whole chunks."""
    # Of hidden's sharding and devices, by its type; the compiler sees zeros.
    return jnp.where(True, jnp.zeros((), hidden.dtype), _pad(hidden, call.chunk_size))


def rows_of(call: HeadCall, logits: Float[Array, "B C V"], targets: Int[Array, "B C"], *, differentiated: bool) -> Any:
    """`RowStatistics` of a chunk's logits, and where it is differentiated their gradient behind them."""
    chosen = REGISTRY.chosen(call.implementation, shape=logits.shape, dtype=logits.dtype)
    return (chosen.backward if differentiated else chosen.forward)(logits, targets, call.options)


def _why_not_triton(_: Target, shape: tuple[int, ...], **facts) -> str | None:
    if math.prod(shape) < 2**31:
        return None
    return f"its offsets are of 32 bits, and {' × '.join(map(str, shape))} logits have more"


#: forward(logits, targets, options) -> rows
#: backward(logits, targets, options) -> (rows, gradient of the loss in the logits)
REGISTRY = triton_or_xla(
    "cross_entropy",
    Implementation(triton.forward, triton.backward, dtypes=FLOATS, why_not=_why_not_triton),
    Implementation(xla.forward, xla.backward),
)


def _pad(array: Array, chunk_size: int, value: int = 0) -> Array:
    """Whole chunks along the sequence."""
    missing = -array.shape[1] % chunk_size
    if not missing:
        return array
    return jnp.pad(array, ((0, 0), (0, missing), *((0, 0),) * (array.ndim - 2)), constant_values=value)
