"""Data sets of text or conversations to the integer arrays of a train step.

A row passes through the modules of this folder in one direction::

    files            JSON lines, JSON, CSV, parquet → rows, each with its file and line
    sources          files, folders, globs and data sets of the `datasets` library → rows
    columns          rows (their cells) → TextRecord | ChatRecord, or by token_rows TokenRecord
    mixture          the examples of an epoch from several data sets
    template         the chat template: messages → text and the ranges of the responses in it
                     (in template_environment, a sandbox with the limits of template_limits)
    named_templates  ChatML, Llama 3, Mistral, Gemma, Alpaca and plain, for tokenizers without
    encoding         text → token ids and a mask of the target tokens; one BOS, a learnt end of turn
    special_texts    special tokens in the rows' content, read as text
    documents        examples as documents in flat arrays, cut to the row length, with counts of the cuts
    packing          documents → rows of a fixed length, with segment ids, positions and shifted targets
    encoded          documents of examples of any kind → a data set: its rows and its counts
    cache            rows kept for the next run
    preferences      answers of pairs, or with labels: from preference_columns by preference_groups to groups in rows
    batches          rows → Batch [A, B, S], shuffled by seed and epoch

`prepare` runs all but the last. `StreamedBatches` does the same incrementally during training, and `Prefetched` runs
either ahead of the train step. Nothing here imports JAX or torch.
"""

from fastjax.data.batches import Batch, Batches, BatchSource
from fastjax.data.columns import parse_row
from fastjax.data.dataset import Dataset, DataStatistics
from fastjax.data.documents import Documents, Example, Examples
from fastjax.data.encoding import Encoder
from fastjax.data.named_templates import NAMED_TEMPLATES, set_chat_template
from fastjax.data.packing import PackedRows, pack_documents
from fastjax.data.prefetch import Prefetched
from fastjax.data.prepare import prepare
from fastjax.data.records import ChatRecord, Record, TextRecord, TokenRecord
from fastjax.data.settings import DataOptions, DataSource
from fastjax.data.sources import read_jsonl
from fastjax.data.streaming import StreamedBatches
from fastjax.data.tokenizer import load_tokenizer

__all__ = [
    "NAMED_TEMPLATES",
    "Batch",
    "BatchSource",
    "Batches",
    "ChatRecord",
    "DataOptions",
    "DataSource",
    "DataStatistics",
    "Dataset",
    "Documents",
    "Encoder",
    "Example",
    "Examples",
    "PackedRows",
    "Prefetched",
    "Record",
    "StreamedBatches",
    "TextRecord",
    "TokenRecord",
    "load_tokenizer",
    "pack_documents",
    "parse_row",
    "prepare",
    "read_jsonl",
    "set_chat_template",
]
