"""What the public functions ask of a call."""

from jax import Array

from pallas_kernels.dispatch import Target


def why_not_triton(_: Target, sizes: tuple[int, int], states: int, **facts) -> str | None:
    """Why the Triton kernels do not serve a call, as `dispatch.Implementation.why_not`.

    Args:
        sizes: of a head's keys and values.
        states: numbers of all states that a kernel has in one array.
        facts: others.
    """
    if any(size not in (64, 128) for size in sizes):
        return f"it takes heads of 64 or 128, not of {sizes[0]} and {sizes[1]}"
    return f"its offsets are of 32 bits, and its states have {states} numbers" if states >= 2**31 else None


def check(operands: tuple[Array, ...], segment_ids: Array | None, state: Array | None) -> None:
    """Refuse operands of `gated_delta` whose shapes or dtypes do not fit together.

    Args:
        operands: q, k, v, decay and beta.
        segment_ids: the documents of each row, or None.
        state: before the tokens, or None.

    Raises:
        ValueError: the first that does not fit, with what was expected.
    """
    q, k, v, decay, beta = operands
    batch, length, heads, size = v.shape
    tokens, states = (batch, length), (batch, heads, k.shape[3], size)
    expected = {
        "q": (q.shape, k.shape),
        "k": (k.shape[:2], tokens),
        "decay": (decay.shape, (*tokens, heads)),
        "beta": (beta.shape, (*tokens, heads)),
        "segment_ids": (tokens if segment_ids is None else segment_ids.shape, tokens),
        "state": (states if state is None else state.shape, states),
    }
    for operand, (given, wanted) in expected.items():
        if given != wanted:
            raise ValueError(f"gated_delta: {operand}: expected axes {wanted}, got {given}, for v {v.shape}")
    if heads % k.shape[2]:
        raise ValueError(f"gated_delta: v: expected a multiple of the {k.shape[2]} key heads, got {heads}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"gated_delta: q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
