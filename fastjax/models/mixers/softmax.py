"""Steps of every mixer with a softmax over keys: attention of whole rows, and the projection of its output."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.models.projection import Projection
from fastjax.parallel import BATCH, ROWS, batch_part, local
from pallas_kernels.attention import SegmentRanges, attention, ring_attention


def attend(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K Dv"],
    ranges: SegmentRanges | None,
    key: PRNGKeyArray | None,
    *,
    block: str,
    across: str | None,
    dropout: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
    **options: Any,
) -> Float[Array, "B S H Dv"]:
    """Causal attention of whole rows, on each device's own rows, or on the tokens of them that it has.

    Args:
        q: queries.
        k: keys.
        v: values.
        ranges: where the documents lie; None: every row is one.
        key: the layer's dropout key; None switches dropout off.
        block: the mixer's name, for its part of the key.
        across: as in `Mixer`.
        dropout: probability of a dropped weight.
        sinks: logits of no key.
        options: further ones of `pallas_kernels.attention.attention`.
    """
    dropped = None if key is None or dropout == 0.0 else jax.random.fold_in(key, _own_key(block))

    def on_device(q, k, v, ranges, key, sinks):
        if across is not None:
            return ring_attention(q, k, v, axis=across, segment_ranges=ranges, sinks=sinks, **options)
        drops = {}
        if key is not None:
            row = batch_part() * q.shape[0]
            drops = {"dropout_rate": dropout, "dropout_key": key, "dropout_row": row}
        return attention(q, k, v, segment_ranges=ranges, sinks=sinks, **options, **drops)

    island = local(on_device, in_specs=(*(ROWS,) * 3, P(BATCH), P(), P()), out_specs=ROWS)
    return island(q, k, v, ranges, dropped, sinks)


def project_output(
    o: Projection,
    out: Float[Array, "B S H D"],
    dtype: jnp.dtype,
    key: PRNGKeyArray | None,
    residual: Float[Array, "B S E"] | None,
) -> Float[Array, "B S E"]:
    """The projection of the heads' output, added to the residual stream where there is one.

    Args:
        o: the projection.
        out: the heads' output.
        dtype: of the result.
        key: the layer's dropout key; None switches dropout off.
        residual: the residual stream; None: the projection's output is returned alone.
    """
    out = out.reshape(*out.shape[:2], -1)
    if residual is None or set(o.dtypes(out.dtype)) == {residual.dtype}:
        (out,) = o(out, key, residual=residual)
        return out.astype(dtype)
    (out,) = o(out, key)
    return residual + out.astype(dtype)


def _own_key(block: str) -> int:
    """Attention's part of a layer's key, whose other parts are the adapters' (`fastjax.lora.dropout`)."""
    return zlib.crc32(block.encode()) & 0x7FFFFFFF
