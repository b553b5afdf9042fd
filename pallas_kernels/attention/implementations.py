"""The implementations by name. A new one is a line here and its place in `config.preference`.

Each is a module with three functions:

    unsupported(target, q, k, v, *, ranges, segments, offset, sinks, options) -> str | None
    forward(q, k, v, mask, sinks, seed, options) -> (out [B, S, H, Dv] in q's dtype, lse [B, H, S] float32)
    backward(q, k, v, mask, sinks, seed, lse, delta, dout, options) -> (dq, dk, dv)

- ``unsupported`` says in one clause why the target or the call is not served: ``ranges`` and ``segments`` say whether
  the documents are known as ranges or as ids (both: ids whose ranges `api` can make), ``offset`` is the position of the
  first query among the keys or, where that is known only at run time, a clause that says so, ``sinks`` whether there
  are any.
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
