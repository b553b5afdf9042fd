"""act(gate) · up of rows sorted by expert, and its gradients with the routing weights': the public functions.

Where a token's experts lie on several devices, each has room for all pairs of token and expert, of which only the first
rows are its own. What is behind these is not computed.

Implementations, in order of preference:

- ``mosaic``: Hopper GPUs, 16 bits, silu without clamp, features in whole tiles of 64;
- ``xla``: everything else; it computes all rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import HALF, Implementation, Registry, Target
from pallas_kernels.glu import clamped_swiglu, glu
from pallas_kernels.routed_glu import mosaic_sm90


def routed_glu(
    gate_up: Float[Array, "M 2F"],
    rows: Int[Array, ""],
    *,
    activation: str,
    clamp: tuple[float, float] | None = None,
    implementation: str | None = None,
) -> Float[Array, "M F"]:
    """act(gate) · up of the first rows, in float32 inside and rounded once; not differentiable.

    Args:
        gate_up: [gate | up], any floating dtype.
        rows: how many of the first ones are computed; what the result has behind them has no meaning.
        activation: act, one of `glu.ACTIVATIONS`; unused with a clamp.
        clamp: limit and alpha of `glu.clamped_swiglu`, which then takes the place of act; or None.
        implementation: None, "mosaic" or "xla".

    Raises:
        ValueError: an unknown activation, shapes or dtypes that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    facts = _facts(gate_up, activation, clamp)
    chosen = REGISTRY.choose(implementation, direction="forward", **facts)
    return REGISTRY[chosen].forward(gate_up, rows, activation, clamp)


def gradients(
    gate_up: Float[Array, "M 2F"],
    dh: Float[Array, "M F"],
    weights: Float[Array, " M"],
    rows: Int[Array, ""],
    *,
    activation: str,
    clamp: tuple[float, float] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "M F"], Float[Array, "M 2F"], Float[Array, " M"]]:
    """Gradients of w·h, and h = act(gate) · up again: (h, dgate_up, dw); dw is ⟨dh, h⟩ of a row, summed in float32.

    Args:
        gate_up: as for `routed_glu`; so is what the results have behind the rows.
        dh: the gradient of h where w is 1, of its dtype.
        weights: w, float32.
        rows: as for `routed_glu`.
        activation: as for `routed_glu`.
        clamp: as for `routed_glu`.
        implementation: as for `routed_glu`.

    Raises:
        ValueError: an unknown activation, shapes or dtypes that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    facts = _facts(gate_up, activation, clamp)
    count, width = gate_up.shape
    if (dh.shape, dh.dtype, weights.shape) != ((count, width // 2), gate_up.dtype, (count,)):
        raise ValueError(
            f"routed_glu.gradients: expected dh [{count}, {width // 2}] in {gate_up.dtype} and weights [{count}], "
            f"given {list(dh.shape)} in {dh.dtype} and {list(weights.shape)}"
        )
    chosen = REGISTRY.choose(implementation, direction="backward", **facts)
    return REGISTRY[chosen].backward(gate_up, dh, weights, rows, activation, clamp)


def _facts(gate_up: Array, activation: str, clamp: tuple[float, float] | None) -> dict[str, Any]:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"routed_glu: expected gate_up [M, 2F], given {list(gate_up.shape)}")
    return {"dtype": gate_up.dtype, "shape": gate_up.shape, "activation": activation, "clamp": clamp}


def _why_not_mosaic(
    _: Target, dtype: DTypeLike, shape: tuple[int, ...], activation: str, clamp: tuple[float, float] | None
) -> str | None:
    if clamp is not None or activation not in ("silu", "swish"):
        return f"it computes silu without clamp, not {activation if clamp is None else 'clamped_swiglu'}"
    rows, columns = mosaic_sm90.ROWS, mosaic_sm90.COLUMNS
    if shape[0] < rows or shape[1] % (2 * columns):
        return f"it takes {rows} rows or more and features in whole tiles of {columns}, this is {dtype} {list(shape)}"
    return None


def _mosaic(gate_up: Array, rows: Array, *_) -> Array:
    return mosaic_sm90.forward(gate_up, rows)


def _mosaic_gradients(gate_up: Array, dh: Array, weights: Array, rows: Array, *_) -> tuple[Array, Array, Array]:
    return mosaic_sm90.gradients(gate_up, dh, weights, rows)


def _xla(gate_up: Array, _, activation: str, clamp: tuple[float, float] | None) -> Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (
        glu(gate, up, activation=activation)
        if clamp is None
        else clamped_swiglu(gate, up, limit=clamp[0], alpha=clamp[1])
    )


def _xla_gradients(
    gate_up: Array, dh: Array, weights: Array, _, activation: str, clamp: tuple[float, float] | None
) -> tuple[Array, Array, Array]:
    h, pull = jax.vjp(lambda gate_up: _xla(gate_up, None, activation, clamp), gate_up)
    wide, summed = dh.astype(jnp.float64 if dh.dtype == jnp.float64 else jnp.float32), weights.dtype
    (dgate_up,) = pull((wide * weights[:, None].astype(wide.dtype)).astype(dh.dtype))
    return h, dgate_up, jnp.sum(wide * h.astype(wide.dtype), axis=1).astype(summed)


#: forward(gate_up, rows, activation, clamp) -> h; backward(gate_up, dh, weights, rows, activation, clamp) -> the three
REGISTRY = Registry(
    "routed_glu",
    {
        "mosaic": Implementation(
            _mosaic, _mosaic_gradients, capability=(9, 0), exactly=True, dtypes=HALF, why_not=_why_not_mosaic
        ),
        "xla": Implementation(_xla, _xla_gradients),
    },
)
