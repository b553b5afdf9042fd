"""Rematerialisation: the residuals that a layer keeps for the backward pass (Chen et al., arXiv 1604.06174)."""

from collections.abc import Callable
from typing import Any

import jax

from fastjax.errors import ConfigError
from fastjax.residuals import SAVED

POLICIES = ("full", "projections", "none")


def checkpointed(block: Callable[..., Any], remat: str, *, scanned: bool) -> Callable[..., Any]:
    """A block of layers with its rematerialisation.

    Args:
        block: pure; "full" keeps its arguments alone.
        remat: "full", "projections" (those named in SAVED too) or "none" (JAX decides).
        scanned: whether it is a scan's body, whose iterations are apart already.

    Raises:
        ConfigError: an unknown policy.
    """
    if remat == "none":
        return block
    if remat == "full":
        return jax.checkpoint(block, prevent_cse=not scanned)
    if remat == "projections":
        policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
        return jax.checkpoint(block, policy=policy, prevent_cse=not scanned)
    raise ConfigError(f"remat: expected one of {list(POLICIES)}, got {remat!r}")
