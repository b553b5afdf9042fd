"""The number of positions that go through the head at once, and the block sizes of the Triton kernel."""

from pallas_kernels.transformations import known

_TOKENS = 2048
_LOGITS_BYTES = 2**30


def chunk_size_for(batch: int, length: int, vocab: int) -> int:
    """The length of a chunk for ``chunked_cross_entropy``.

    A chunk is at most 2,048 tokens (GEMMs of that many rows already run at full speed) and at most 1 GiB of logits if
    they were float32: 2,048 tokens up to a vocabulary of 131,072, 1,024 for one of 262,144. The chunks of a row are as
    equal as can be, so that no chunk is mostly padding.

    Args:
        batch: rows on one device; a symbolic number counts as 1.
        length: positions a row.
        vocab: words.

    Returns:
        Positions a row and chunk, between 1 and length.
    """
    tokens = min(_TOKENS, _LOGITS_BYTES // (4 * vocab))
    most = min(length, max(1, tokens // int(known(batch, 1))))
    chunks = -(-length // most)
    return -(-length // chunks)


#: Words of a block, and warps of a program, which owns a row: sixteen words a thread, and as many of the next block on
#: their way. Of the sizes measured on an H200 the best but for two percent, whatever the rows (docs/lab/loss.md).
COLUMNS, NUM_WARPS = 4096, 8
