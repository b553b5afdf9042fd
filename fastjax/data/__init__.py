"""From files of text or conversations to the integer arrays of a train step.

A row of text flows one way through the modules of this folder::

    sources     JSON lines → TextRecord | ChatRecord, each with its file and line
    template    the tokenizer's chat template: messages → text, and where the responses lie in it
    encoding    text → token ids and a mask of the tokens to learn; one BOS, a learnt end of turn
    documents   all examples in three flat arrays, cut to the row length, what was cut counted
    packing     documents → rows of a fixed length, with segment ids, positions and shifted targets
    batches     rows → Batch [A, B, S], shuffled by seed and epoch

`prepare` runs the first five. Nothing here imports JAX or torch.
"""

from fastjax.data.batches import Batch, Batches
from fastjax.data.documents import Documents
from fastjax.data.encoding import Encoder
from fastjax.data.packing import PackedRows, pack_documents
from fastjax.data.prepare import Dataset, prepare
from fastjax.data.sources import ChatRecord, TextRecord, read_jsonl
from fastjax.data.statistics import DataStatistics
from fastjax.data.tokenizer import load_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "ChatRecord",
    "DataStatistics",
    "Dataset",
    "Documents",
    "Encoder",
    "PackedRows",
    "TextRecord",
    "load_tokenizer",
    "pack_documents",
    "prepare",
    "read_jsonl",
]
