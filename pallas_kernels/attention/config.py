"""Names of what attention keeps for its backward pass, which implementation is preferred, and the XLA path's blocks."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

from pallas_kernels.dispatch import Target

SAVEABLE_NAMES = ("attention_out", "attention_lse")
"""What the backward pass needs beside q, k and v: the output [B, S, H, Dv] in q's dtype and the log-sum-exp of each
query's logits [B, H, S] in float32. Both are named with ``jax.ad_checkpoint.checkpoint_name``, so that
``jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(*SAVEABLE_NAMES))`` keeps them and no
attention runs a second time; naming only the output would keep it and still run the forward kernel for the rest."""

_LOGITS_BYTES = 2**27


def preference(target: Target, direction: str) -> tuple[str, ...]:
    """The implementations, the fastest on a target first; the first that can serve a call is taken.

    Measured on an H200 (docs/performance.md): mosaic before cuDNN before Triton, but for documents, which cuDNN is the
    slowest at. On other cards Mosaic's instructions do not exist, and nothing was measured: cuDNN, which is
    known to be good there, stays before Triton, which takes what cuDNN refuses (a cap, sinks, dropout, other positions)
    and skips tiles that XLA computes. XLA serves every call, so what stands behind it runs by name alone. float32 is
    XLA's, in products of float32: no kernel takes it.

    Args:
        target: the device to plan for.
        direction: "forward" or "backward"; one order for both so far.

    Returns:
        Names of `implementations.IMPLEMENTATIONS`.
    """
    del direction
    if target.compute_capability == (9, 0):
        return ("mosaic", "cudnn", "triton", "xla")
    return ("cudnn", "triton", "xla", "mosaic")


_FORCED: contextvars.ContextVar[str | Sequence[str | None] | None] = contextvars.ContextVar("_FORCED", default=None)


@contextlib.contextmanager
def attention_implementation(implementation: str | Sequence[str | None] | None) -> Iterator[None]:
    """A context in which calls of `attention` that name no implementation take this one.

    For comparing implementations in a whole model. It counts while a function is traced; what `jax.jit` has traced
    before stays what it is.

    Args:
        implementation: as `attention` takes it.
    """
    token = _FORCED.set(implementation)
    try:
        yield
    finally:
        _FORCED.reset(token)


def forced() -> str | Sequence[str | None] | None:
    """What the innermost `attention_implementation` says; None without one."""
    return _FORCED.get()


def query_block(batch: int, heads: int, length: int, keys: int) -> int:
    """Queries that the XLA path handles at once: as many as keep the float32 logits at 128 MiB, in equal blocks.

    Args:
        batch: B.
        heads: H.
        length: S.
        keys: T.

    Returns:
        Queries a block, between 1 and length; length itself means one block and no loop.
    """
    most = min(length, max(1, _LOGITS_BYTES // (4 * batch * heads * keys)))
    blocks = -(-length // most)
    return -(-length // blocks)
