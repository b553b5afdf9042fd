"""Rows of an embedding table, which may lie in the host's memory: then the device holds the rows of a batch alone.

The host gathers the rows, in a part of the program that XLA runs there, and sends them: 64 MiB a step for 8,192 tokens
of width 4,096, where the table of 128,256 tokens takes 1 GiB.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import compute_on
from jaxtyping import Array, Float, Int

from fastjax.host_memory import in_host_memory
from fastjax.parallel.gather import holds_shards, looked_up

#: jax 0.10 has it beside a context manager of the shorter name.
_compute_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)


def take_rows(table: Float[Array, "V E"], tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """table[tokens] on the device, wherever the table is.

    Args:
        table: the embeddings; frozen where it is in the host's memory; in an island over `fsdp` this device's rows.
        tokens: token ids.
    """
    if holds_shards():
        return looked_up(table, tokens)
    if not in_host_memory(table):
        return jnp.take(table, tokens, axis=0)

    def gather(table: Array, tokens: Array) -> Array:
        return jnp.take(table, tokens, axis=0, mode="clip")

    gather = _compute_on(gather, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    rows = gather(table, jax.device_put(tokens, jax.memory.Space.Host))
    return jax.device_put(rows, jax.memory.Space.Device)
