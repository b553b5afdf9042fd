"""Tiny Llama folders made with NumPy alone."""

import json

import ml_dtypes
import numpy as np
import pytest

from convert.families import family_for
from tests.support.folders import write_checkpoint

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 5,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}


@pytest.fixture
def llama_config():
    """A config with every field that shapes a tensor off its default."""
    return dict(CONFIG)


@pytest.fixture
def make_folder(tmp_path):
    """Function that writes a folder with random weights and returns (folder, {checkpoint name: array})."""

    def make(name="model", *, config=CONFIG, dtype=ml_dtypes.bfloat16, extra=None, without=(), **options):
        rng = np.random.default_rng(0)
        rows = family_for(config).specs(config)
        tensors = {row.name: rng.standard_normal(row.shape).astype(dtype) for row in rows}
        tensors |= extra or {}
        for left_out in without:
            del tensors[left_out]
        folder = tmp_path / name
        write_checkpoint(folder, tensors.items(), config, **options)
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
        (folder / "notes.txt").write_text("not part of a model")
        return folder, tensors

    return make
