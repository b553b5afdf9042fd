"""What a layer keeps for the backward pass, and what it computes again (Chen et al., arXiv 1604.06174)."""

from collections.abc import Callable
from typing import Any

import jax

from fastjax.errors import ConfigError
from fastjax.residuals import SAVED

POLICIES = ("full", "projections", "none")


def checkpointed(block: Callable[..., Any], remat: str, *, scanned: bool) -> Callable[..., Any]:
    """The block of layers with its rematerialisation.

    Args:
        block: pure; its arguments are what "full" keeps.
        remat: "full", "projections" (everything in SAVED is kept too) or "none" (JAX decides).
        scanned: whether it is the body of a scan, which separates its iterations by itself.

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
    raise ConfigError(f"remat: expected one of {list(POLICIES)}, given {remat!r}")
