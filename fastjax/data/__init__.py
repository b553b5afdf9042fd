"""Data sets of text or conversations to the integer arrays of a train step.

A row passes through the modules of this folder in one direction::

    files            JSON lines, JSON, CSV, parquet → rows, each with its file and line
    sources          files, folders, globs and data sets of the `datasets` library → rows
    columns          rows (their cells) → TextRecord | ChatRecord, or by token_rows TokenRecord
    mixture          the examples of an epoch from several data sets
    template         the chat template: messages → text and the ranges of the responses in it
                     (in template_environment, a sandbox with the limits of template_limits)
    named_templates  templates by name, for tokenizers without; turn_formats: those that are rows of a table
    encoding         text → token ids and a mask of the target tokens; one BOS, a learnt end of turn
    special_texts    special tokens in the rows' content, read as text
    documents        examples as documents in flat arrays, cut to the row length, with counts of the cuts
    packing          documents → rows of a fixed length, with segment ids, positions and shifted targets
    encoded          documents of examples of any kind → a data set: its rows and its counts
    cache            rows kept for the next run
    preferences      answers of pairs, or with labels: from preference_columns by preference_groups to groups in rows
    batches          rows → Batch [A, B, S], shuffled by seed and epoch

`prepare` runs all but the last. `StreamedBatches` does the same incrementally during training, and `Prefetched` runs
either ahead of the train step. Nothing here imports JAX or torch, and a name its module when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastjax.data.batches import Batch as Batch
    from fastjax.data.batches import Batches as Batches
    from fastjax.data.columns import parse_row as parse_row
    from fastjax.data.dataset import Dataset as Dataset
    from fastjax.data.encoding import Encoder as Encoder
    from fastjax.data.named_templates import NAMED_TEMPLATES as NAMED_TEMPLATES
    from fastjax.data.named_templates import set_chat_template as set_chat_template
    from fastjax.data.packing import PackedRows as PackedRows
    from fastjax.data.packing import pack_documents as pack_documents
    from fastjax.data.pipeline import prepare as prepare
    from fastjax.data.prefetch import Prefetched as Prefetched
    from fastjax.data.records import ChatRecord as ChatRecord
    from fastjax.data.records import TextRecord as TextRecord
    from fastjax.data.records import TokenRecord as TokenRecord
    from fastjax.data.settings import DataOptions as DataOptions
    from fastjax.data.settings import DataSource as DataSource
    from fastjax.data.sources import read_jsonl as read_jsonl
    from fastjax.data.streaming import StreamedBatches as StreamedBatches
    from fastjax.data.tokenizer import load_tokenizer as load_tokenizer

_MODULES = {
    "batches": ("Batch", "Batches"),
    "columns": ("parse_row",),
    "dataset": ("Dataset",),
    "encoding": ("Encoder",),
    "named_templates": ("NAMED_TEMPLATES", "set_chat_template"),
    "packing": ("PackedRows", "pack_documents"),
    "pipeline": ("prepare",),
    "prefetch": ("Prefetched",),
    "records": ("ChatRecord", "TextRecord", "TokenRecord"),
    "settings": ("DataOptions", "DataSource"),
    "sources": ("read_jsonl",),
    "streaming": ("StreamedBatches",),
    "tokenizer": ("load_tokenizer",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"fastjax.data.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
