"""The implementations by name. A new one is a line here and its place in `config.preference`.

Each is a module with three functions:

    unsupported(call) -> str | None
    forward(q, k, v, mask, sinks, seed, options) -> (out [B, S, H, Dv] in q's dtype, lse [B, H, S] float32)
    backward(q, k, v, mask, sinks, seed, lse, delta, dout, options) -> (dq, dk, dv)

- ``unsupported`` says in one clause why a `call.Call`, on its target, is not served.
- ``lse`` is the natural log-sum-exp of the scaled, capped, visible logits and the sink, +inf for a query that sees
  neither key nor sink; so exp(logit − lse) is its weight, and zero there.
- ``seed`` is uint32[2] where options.dropout_rate > 0, else None; `dropout.random_bits` says what is kept.
- ``delta`` is rowsum(dout ∘ out) − dlse, float32 [B, H, S].
"""

from types import ModuleType

from pallas_kernels.attention import cudnn, mosaic_sm90, triton, xla

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "mosaic": mosaic_sm90,
    "cudnn": cudnn,
    "triton": triton,
    "xla": xla,
}

NEEDS_RANGES: frozenset[str] = frozenset({"mosaic", "triton"})
"""Those that take documents as ranges alone."""
