"""Attention problems that tests and benchmarks share."""

from typing import NamedTuple


class Heads(NamedTuple):
    """The heads of a model family: H query heads, K key heads of size D."""

    name: str
    heads: int
    kv_heads: int
    size: int


HEADS = (
    Heads("llama-3-8b", 32, 8, 128),
    Heads("llama-2-7b", 32, 32, 128),
    Heads("llama-3.2-1b", 32, 8, 64),
    Heads("gemma-2-2b", 8, 4, 256),
)

LENGTHS = (512, 2048, 4096, 8192)
"""Tokens a row; benchmarks keep batch × length at 8,192."""
