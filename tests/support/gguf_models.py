"""Tiny model folders with a tokenizer that has a place in a GGUF file."""

import json

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from convert.checkpoint import write_checkpoint
from convert.families import family_for

TEMPLATE = "{{ messages }}"


def write_tokenizer(folder):
    """263 rows or more: bytes, two merges, two special tokens and one that is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)} | {"ab": 256, "abc": 257}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 258)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_model(folder, config):
    """A folder with random bfloat16 weights; returns {path: array}."""
    rng = np.random.default_rng(0)
    rows = family_for(config).rows(config)
    arrays = {row.path: rng.standard_normal(row.shape).astype(ml_dtypes.bfloat16) for row in rows}
    write_checkpoint(folder, [(row.name, arrays[row.path]) for row in rows], config)
    write_tokenizer(folder)
    return arrays
