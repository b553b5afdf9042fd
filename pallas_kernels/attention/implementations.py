"""The implementations of attention by name. A new one is a line here and its place in `config.preference`.

Each is a module with three functions; `operands` says what they read:

    why_not(call) -> str | None
    forward(operands, options) -> (out [B, S, H, Dv] in q's dtype, lse [B, H, S] float32)
    backward(operands, cotangents, options) -> (dq, dk, dv)

- ``why_not`` says in one clause why a `call.Call` cannot be served on its target.
- ``lse`` is the natural log-sum-exp of the scaled, capped, visible logits and the sink, +inf for a query that sees
  neither key nor sink; so exp(logit − lse) is its weight, and zero there.
- ``seed`` is uint32[2] where options.dropout_rate > 0, else None; `dropout.random_bits` says what is kept.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.attention import config, cudnn, mosaic_sm90, triton, xla
from pallas_kernels.attention.call import Call
from pallas_kernels.dispatch import Implementation, Registry

NEEDS_RANGES: frozenset[str] = frozenset({"mosaic", "triton"})
"""Implementations that read documents as ranges alone."""


def on_ranges(module: Any) -> Implementation:
    """The implementation of a module that reads documents as ranges: their ids must be such that ranges can be made."""
    return Implementation(lambda call: call.disorder or module.why_not(call), module.forward, module.backward)


REGISTRY: Registry[Call] = Registry(
    "attention",
    {
        "mosaic": on_ranges(mosaic_sm90),
        "cudnn": Implementation(cudnn.why_not, cudnn.forward, cudnn.backward),
        "triton": on_ranges(triton),
        "xla": Implementation(xla.why_not, xla.forward, xla.backward),
    },
    lambda call: config.preference(call.target),
)


def choose_pair(
    implementation: str | Sequence[str | None] | None, call: Call, *, lse_gradient: bool = False
) -> tuple[str, str]:
    """The names of the implementations of the forward and of the backward pass.

    Args:
        implementation: as `attention` takes it.
        call: to be served.
        lse_gradient: whether the log-sum-exp has a gradient.
    """
    pair = (
        (implementation, implementation)
        if implementation is None or isinstance(implementation, str)
        else implementation
    )
    if len(pair) != 2:
        raise ValueError(
            "attention: implementation: expected a name or a pair of names, for the forward and the backward pass, "
            f"got {implementation!r}"
        )
    differ = pair[0] != pair[1]
    forward = REGISTRY.choose(call, pair[0], direction="forward" if differ else "")
    call = call._replace(lse_gradient=lse_gradient)
    return forward, REGISTRY.choose(call, pair[1], direction="backward" if differ else "")
