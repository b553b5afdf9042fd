"""The implementations of attention by name. A new one is a line here and its place in `config.preference`.

Each is a module with three functions:

    why_not(call) -> str | None
    forward(q, k, v, mask, sinks, seed, options) -> (out [B, S, H, Dv] in q's dtype, lse [B, H, S] float32)
    backward(q, k, v, mask, sinks, seed, lse, delta, dout, options) -> (dq, dk, dv)

- ``why_not`` says in one clause why a `call.Call` cannot be served on its target.
- ``lse`` is the natural log-sum-exp of the scaled, capped, visible logits and the sink, +inf for a query that sees
  neither key nor sink; so exp(logit − lse) is its weight, and zero there.
- ``seed`` is uint32[2] where options.dropout_rate > 0, else None; `dropout.random_bits` says what is kept.
- ``delta`` is rowsum(dout ∘ out) − dlse, float32 [B, H, S].
"""

from typing import Any

from pallas_kernels.attention import config, cudnn, mosaic_sm90, triton, xla
from pallas_kernels.attention.call import Call
from pallas_kernels.dispatch import Implementation, Registry

NEEDS_RANGES: frozenset[str] = frozenset({"mosaic", "triton"})
"""Implementations that read documents as ranges alone."""


def on_ranges(module: Any) -> Implementation:
    """An implementation that reads documents as ranges: ids must be ones of which ranges can be made."""
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
