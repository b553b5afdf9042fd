"""A gated linear unit between adapted projections: what low-rank adapters add is added where gate and up are read.

Of a block down(act(gate) · up) with adapters (arXiv 2106.09685) the large products and the thin ones x·Aᵀ are made
elsewhere; here is what lies between them. gate and up come as W leaves them, and their adapters' B is applied to the
thin products x·Aᵀ on the way in, so that no pass over gate and up is made for it; the thin product of the down
projection, h·Aᵀ, is made on the way out. The backward pass likewise adds the down adapter's part to the gradient of h,
and makes the gradients of gate's and up's B and of down's A while their operands are in registers: h is never stored
for it.

Implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, 16-bit activations;
- ``xla``: everything else.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import compat, dispatch
from pallas_kernels.glu import adapted_xla, config
from pallas_kernels.glu.reference import ACTIVATIONS


class Inner(NamedTuple):
    """The adapters of gate and up, at the point where their thin products are there.

    Attributes:
        thin: x·Aᵀ of gate, then of up, in the dtype of gate and up; [N, R] where the two share one.
        lora_B: of gate, then of up, with the adapters' scale.
    """

    thin: Float[Array, "N 2R"]
    lora_B: Float[Array, "2 F R"]


def adapted_forward(
    both: Float[Array, "N 2F"],
    inner: Inner | None,
    down_A: Float[Array, "R F"] | None,
    *,
    activation: str,
    implementation: str | None = None,
) -> tuple[Float[Array, "N F"], Float[Array, "N R"] | None]:
    """The gated product h = activation(gate) · up, and h·Aᵀ for the projection that reads it.

    In float32 inside; each is rounded once.

    Args:
        both: gate, then up, without their adapters.
        inner: their adapters; None: there are none.
        down_A: A of the adapter that reads h; None: there is none.
        activation: one of ``ACTIVATIONS``.
        implementation: None, "triton" or "xla".

    Returns:
        h, and h·Aᵀ or None, in the dtype of `both`.

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the implementation that was asked for cannot serve this call; the message says why.
    """
    ranks = _check("glu.adapted_forward", both, inner, down_A, activation)
    chosen = select(both.shape, both.dtype, ranks, activation, implementation)
    if chosen == "xla":
        return adapted_xla.forward(both, inner, down_A, activation)
    from pallas_kernels.glu import adapted_triton

    compat.silence_triton_deprecation()
    thin, lora_B = (None, None) if inner is None else inner
    tiles = config.forward_config(_capability(), max(ranks, default=0))
    return adapted_triton.forward(both, thin, lora_B, down_A, activation, tiles)


def adapted_backward(
    both: Float[Array, "N 2F"],
    inner: Inner | None,
    dh: Float[Array, "N F"],
    down: tuple[Float[Array, "R F"], Float[Array, "N R"]] | None,
    *,
    activation: str,
    implementation: str | None = None,
) -> tuple[Float[Array, "N 2F"], Float[Array, "2 F R"] | None, Float[Array, "R F"] | None]:
    """The gradients of gate and up as their weights and thin products need them, and those of B and of down's A.

    Args:
        both: as in `adapted_forward`.
        inner: likewise.
        dh: the gradient of h that comes through the down projection's weight.
        down: A of the down projection's adapter and the gradient of h·Aᵀ; None: there is none.
        activation: one of ``ACTIVATIONS``.
        implementation: None, "triton" or "xla".

    Returns:
        The gradient of `both` in its dtype; of `inner.lora_B`, float32, or None; of `down_A`, float32, or None.

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the implementation that was asked for cannot serve this call; the message says why.
    """
    down_A, dthin = (None, None) if down is None else down
    ranks = _check("glu.adapted_backward", both, inner, down_A, activation)
    if dh.shape != (both.shape[0], both.shape[1] // 2) or dh.dtype != both.dtype:
        raise ValueError(f"glu.adapted_backward: dh must be {both.dtype} of half of {list(both.shape)}, got {dh}")
    chosen = select(both.shape, both.dtype, ranks, activation, implementation)
    if chosen == "xla":
        return adapted_xla.backward(both, inner, dh, down_A, dthin, activation)
    from pallas_kernels.glu import adapted_triton

    compat.silence_triton_deprecation()
    thin, lora_B = (None, None) if inner is None else inner
    tiles = config.backward_config(_capability(), max(ranks, default=0))
    return adapted_triton.backward(both, thin, lora_B, dh, down_A, dthin, activation, tiles)


def select(shape, dtype, ranks: tuple[int, ...], activation: str, implementation: str | None = None) -> str:
    """The implementation that serves a call.

    Args:
        shape: of gate and up together, [N, 2F].
        dtype: theirs.
        ranks: of the adapters of gate and up, and of down; 0: none.
        activation: its name.
        implementation: as the caller gives it.
    """
    return dispatch.select("glu.adapted", implementation, candidates(shape, dtype, ranks, activation))


def candidates(shape, dtype, ranks: tuple[int, ...], activation: str) -> list[tuple[str, str | None]]:
    """The implementations in order of preference, each with the reason why it cannot serve the call, or None."""
    target, (rows, columns) = dispatch.target(), shape
    capability = target.compute_capability if target.platform == "cuda" else None
    widths = [rank for rank in ranks if rank and rank not in config.RANKS]
    if capability is None or capability < (8, 0):
        reason = f"it needs an NVIDIA GPU of compute capability 8.0 or more, the target is {target}"
    elif jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        reason = f"it computes with bfloat16 or float16, not with {jnp.dtype(dtype)}"
    elif activation not in config.ACTIVATIONS:
        reason = f"Pallas-Triton has no {activation}"
    elif widths or max(ranks) > config.largest_rank(capability):
        most = config.largest_rank(capability)
        reason = f"it serves ranks {list(config.RANKS)} up to {most} on {target}, not {max(ranks)}"
    elif rows % config.TILE or columns // 2 % config.TILE:
        reason = f"it takes whole tiles of {config.TILE}, not {rows} tokens by {columns // 2} features"
    else:
        reason = None
    return [("triton", reason), ("xla", None)]


def padded_rank(rank: int) -> int:
    """The rank to which zeros are added so that a kernel can serve it: itself where none is large enough."""
    return next((size for size in config.RANKS if size >= rank), rank)


def _capability() -> tuple[int, int]:
    """The target's, which `candidates` has looked at."""
    capability = dispatch.target().compute_capability
    assert capability is not None
    return capability


def _check(op: str, both, inner: Inner | None, down_A, activation: str) -> tuple[int, int]:
    """The ranks of the adapters before and behind."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {activation!r}")
    if both.ndim != 2 or both.shape[1] % 2:
        raise ValueError(f"{op}: gate and up must be one array [N, 2F], got {list(both.shape)}")
    rows, features = both.shape[0], both.shape[1] // 2
    if inner is not None:
        rank = inner.lora_B.shape[-1]
        if inner.lora_B.shape != (2, features, rank) or inner.thin.shape not in ((rows, rank), (rows, 2 * rank)):
            raise ValueError(
                f"{op}: for gate and up {list(both.shape)}, lora_B must be [2, {features}, R] and thin [{rows}, 2R] or "
                f"[{rows}, R], got {list(inner.lora_B.shape)} and {list(inner.thin.shape)}"
            )
    if down_A is not None and (down_A.ndim != 2 or down_A.shape[1] != features):
        raise ValueError(f"{op}: down_A must be [R, {features}], got {list(down_A.shape)}")
    given = [array for array in (*(inner or ()), down_A) if array is not None]
    if any(array.dtype != both.dtype for array in given):
        raise ValueError(f"{op}: all operands must have one dtype, got {[str(a.dtype) for a in (both, *given)]}")
    return (0 if inner is None else inner.lora_B.shape[-1], 0 if down_A is None else down_A.shape[0])
