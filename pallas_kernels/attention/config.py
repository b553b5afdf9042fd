"""Names of the saved residuals, the order of preference of implementations, and the XLA path's blocks."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

from pallas_kernels.dispatch import Target
from pallas_kernels.transformations import known

SAVEABLE_NAMES = ("attention_out", "attention_lse")
"""Residuals of the backward pass beside q, k and v: the output [B, S, H, Dv] in q's dtype and the log-sum-exp of each
query's logits [B, H, S] in float32. Both are named with ``jax.ad_checkpoint.checkpoint_name``, so that
``jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(*SAVEABLE_NAMES))`` keeps them and no
attention runs a second time; naming only the output would keep it and still run the forward kernel for the rest."""

_LOGITS_BYTES = 2**27


def preference(target: Target) -> tuple[str, ...]:
    """Names of the implementations, the fastest on a target first; the same for both passes.

    Measured on an H200 (docs/lab/attention.md): Mosaic before cuDNN before Triton, but for documents, at which cuDNN is
    the slowest. On other cards Mosaic's instructions do not exist, and nothing was measured: cuDNN, known to be good
    there, stays before Triton, which takes the calls that cuDNN refuses (a cap, sinks, dropout, other positions) and
    skips tiles that XLA computes. XLA serves every call, so a name behind it runs only when forced. float32 is XLA's,
    in products of float32: no kernel takes it.
    """
    if target.compute_capability == (9, 0):
        return ("mosaic", "cudnn", "triton", "xla")
    return ("cudnn", "triton", "xla", "mosaic")


_FORCED: contextvars.ContextVar[str | Sequence[str | None] | None] = contextvars.ContextVar("_FORCED", default=None)


@contextlib.contextmanager
def attention_implementation(implementation: str | Sequence[str | None] | None) -> Iterator[None]:
    """A context whose `attention` calls take this implementation unless they name one.

    For comparing implementations in a whole model. It acts while a function is traced; functions that `jax.jit` has
    already traced keep theirs.

    Args:
        implementation: as `attention` takes it.
    """
    token = _FORCED.set(implementation)
    try:
        yield
    finally:
        _FORCED.reset(token)


def forced() -> str | Sequence[str | None] | None:
    """The implementation of the innermost `attention_implementation`; None without one."""
    return _FORCED.get()


def query_block(batch: int, heads: int, length: int, keys: int) -> int:
    """Queries that the XLA path handles at once: as many as keep the float32 logits at 128 MiB, in equal blocks.

    Args:
        batch: B; one that is symbolic counts as 1.
        heads: H.
        length: S.
        keys: T.

    Returns:
        Queries a block, between 1 and length; length itself means one block and no loop.
    """
    most = min(length, max(1, _LOGITS_BYTES // (4 * int(known(batch, 1)) * heads * keys)))
    blocks = -(-length // most)
    return -(-length // blocks)
