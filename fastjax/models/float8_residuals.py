"""Gate and up of a layer's MLP kept for the backward pass in float8 (`remat.Policy.float8`)."""

from typing import Any

import jax.numpy as jnp

from fastjax.errors import ConfigError
from fastjax.models.mlp import MLP
from pallas_kernels import dispatch


def keep_in_float8(layers: Any, policy: str, dtype: jnp.dtype, places: int | None) -> None:
    """Make the layers keep their MLPs' gate and up so.

    Args:
        layers: of one period, which are changed.
        policy: its name, for errors.
        dtype: of the residual stream.
        places: of a row that an MLP takes at once; None: all.

    Raises:
        ConfigError: a layer, the device or the settings have none to keep; nothing is downgraded in silence.
    """
    expected = f"use_gradient_checkpointing: expected another policy, such as projections, got {policy}"
    if dtype == jnp.float32:
        raise ConfigError(f"{expected} with dtype float32: it rounds what the backward pass reads to three bits")
    if places is not None:
        raise ConfigError(f"{expected} with mlp_chunk {places}: MLPs by chunks keep nothing")
    target = dispatch.target()
    capability = target.compute_capability
    if target.platform != "cpu" and (target.platform != "cuda" or capability is None or capability < (8, 9)):
        raise ConfigError(
            f"{expected} on {target}: float8 needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, "
            "Blackwell)"
        )
    for layer in layers:
        if not isinstance(layer.mlp, MLP):
            raise ConfigError(f"{expected} for mixtures of experts: it is of dense gated MLPs")
        why_not = "it is computed in float32" if layer.mlp.float32 else layer.mlp.why_not_fused(dtype)
        if why_not is not None:
            raise ConfigError(f"{expected} for an MLP that keeps no gate and up in one piece: {why_not}")
        layer.mlp.float8 = True
