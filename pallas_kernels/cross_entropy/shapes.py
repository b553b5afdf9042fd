"""Heads that tests and benchmarks share."""

from typing import NamedTuple


class Head(NamedTuple):
    """A language model's head: E model width, V vocabulary."""

    name: str
    width: int
    vocab: int


HEADS = (
    Head("llama-3-8b", 4096, 128_256),
    Head("llama-2-7b", 4096, 32_000),
    Head("gemma-2-2b", 2304, 256_000),
)
