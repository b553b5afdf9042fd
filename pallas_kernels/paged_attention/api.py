"""Attention in decoding: the queries of one token a row, and a cache of pages that a table gives each row.

A page holds P consecutive tokens of one row; the pages of a row may lie anywhere, and rows may share them (Kwon et al.,
arXiv 2309.06180). The implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, bfloat16 and float16; each page is read once for all query
  heads of its key head, and a row's pages may be split over several programs;
- ``xla``: everything else; it gathers the pages of every row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array as JaxArray
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import HALF, Implementation, Target, triton_or_xla
from pallas_kernels.paged_attention import triton, xla
from pallas_kernels.transformations import number


class Options(NamedTuple):
    """The static part of a call.

    Attributes:
        scale: factor of the logits.
        sliding_window: tokens that a query sees, itself included; None: all.
        logits_soft_cap: logits become cap · tanh(logits / cap); None: they stay.
    """

    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None


def paged_attention(
    q: Float[Array, "R H D"],
    keys: Float[Array, "L N K P D"],
    values: Float[Array, "L N K P Dv"] | int,
    table: Int[Array, "R M"],
    lengths: Int[Array, "R"],
    *,
    layer: int | Int[Array, ""] = 0,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "R H Dv"]:
    """softmax(scale · q kᵀ) v over the last tokens of each row's pages.

    Query head h uses key head h // (H / K). Logits, softmax and sums are float32. Page table[r, i] of row r holds its
    tokens i·P to (i + 1)·P - 1; entries behind the last page that a row needs are not read, whatever they are.

    Args:
        q: the query of each row's last token.
        keys: pages of several layers, so that a loop over layers takes no slice of them; in q's dtype or
            float8_e4m3fn, which is read as q's.
        values: pages of the same dtype; their size may differ from that of the keys. A number: a key's first so many
            features are its value, as in latent attention.
        table: int32, the numbers of each row's pages.
        lengths: int32, tokens of each row, the last one included; with 0 the row's output is 0.
        layer: which layer's pages are read.
        sliding_window: only so many of the last tokens are seen.
        logits_soft_cap: the scaled logits become cap · tanh(logits / cap).
        sinks: float32, a logit for each query head that joins the softmax's denominator and has no value.
        scale: factor of the logits, 1/√D by default.
        implementation: None, "triton" or "xla".

    Returns:
        The weighted values in q's dtype. Not differentiable: decoding has no backward pass.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    _check(q, keys, values, table, lengths, sinks, sliding_window)
    options = Options(
        q.shape[-1] ** -0.5 if scale is None else number("paged_attention", "scale", scale),
        sliding_window,
        None if logits_soft_cap is None else number("paged_attention", "logits_soft_cap", logits_soft_cap),
    )
    inside = isinstance(values, int)
    sizes = q.shape[-1], values if isinstance(values, int) else values.shape[-1]
    facts = {"dtype": q.dtype, "page": keys.shape[3], "sizes": sizes, "scale": options.scale, "inside": inside}
    chosen = REGISTRY.chosen(implementation, **facts)
    index = jnp.asarray(layer, jnp.int32)
    return chosen.forward(q, keys, values, table, lengths, index, sinks, options)


def _why_not_triton(_: Target, page: int, sizes: tuple[int, int], scale: float, inside: bool, **facts) -> str | None:
    if inside:
        return "it takes values beside the keys, not in them"
    if page < 16 or page & (page - 1):
        return f"it takes pages of a power of two tokens from 16 on, not of {page}"
    if any(size < 16 or size & (size - 1) for size in sizes):
        return f"it takes heads whose sizes are powers of two from 16 on, not {sizes[0]} and {sizes[1]}"
    return None if scale > 0 else f"it takes a scale above 0, not {scale:g}"


#: forward(q, keys, values, table, lengths, layer, sinks, options) -> the weighted values.
REGISTRY = triton_or_xla(
    "paged_attention",
    Implementation(triton.forward, dtypes=HALF, why_not=_why_not_triton),
    Implementation(xla.forward),
)


def _check(q: JaxArray, keys, values, table, lengths, sinks, sliding_window: int | None) -> None:
    rows, heads, size = q.shape
    if isinstance(values, int):
        if not 0 < values <= size:
            raise ValueError(f"paged_attention: values: expected 1 to {size} features of a key, got {values}")
        values = keys
    expected = {
        "keys": (keys.shape[-1:], (size,)),
        "values": (values.shape[:-1], keys.shape[:-1]),
        "table": (table.shape[:-1], (rows,)),
        "lengths": (lengths.shape, (rows,)),
        "sinks": ((heads,) if sinks is None else sinks.shape, (heads,)),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise ValueError(f"paged_attention: {name}: expected axes {wanted}, got {given}, for q {q.shape}")
    if heads % keys.shape[2]:
        raise ValueError(f"paged_attention: q: expected a multiple of the {keys.shape[2]} key heads, got {heads}")
    if keys.dtype != values.dtype or keys.dtype not in (q.dtype, jnp.float8_e4m3fn):
        raise ValueError(
            f"paged_attention: keys, values: expected q's {q.dtype} or float8_e4m3fn, got {keys.dtype}, {values.dtype}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"paged_attention: sliding_window: expected at least 1, got {sliding_window}")
