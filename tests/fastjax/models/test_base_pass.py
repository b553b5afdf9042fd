"""A forward pass without the adapters is the base's, bit for bit."""

import jax
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import ConfigError
from fastjax.models.decoder import lm_logits
from tests.support import tiny

EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]


def base(**load):
    shape = {"tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 128}
    return tiny.model(tiny.shared_folder(**shape), tiny.config(**shape), **load)


def logits(model, tokens, **options):
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    @jax.jit
    def run(trainable, frozen):
        decoder = nnx.merge(model.graphdef, trainable, frozen)
        return lm_logits(decoder.lm_head, decoder(tokens, positions, **options), **options)

    return np.asarray(run(model.trainable, model.frozen))


@pytest.mark.exhaustive("load0-options0")
@pytest.mark.parametrize(
    ("load", "options"),
    [
        ({"load_in_4bit": True}, {"target_modules": EVERYTHING}),
        ({}, {"target_modules": EVERYTHING, "use_dora": True, "lora_dropout": 0.3}),
        ({"layer_loop": "unroll"}, {"layers_to_transform": [1]}),
        ({}, {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [4]}}),
    ],
)
def test_without_adapters_it_is_the_base(load, options):
    bare = base(**load)
    adapted = tiny.adapted(bare, **options)
    tokens = np.stack(tiny.documents(tiny.CONFIG, (20, 20)))
    tokens[:, 5:7] = 3, 7
    expected = logits(bare, tokens)
    assert logits(adapted, tokens, adapters=False).tobytes() == expected.tobytes()
    assert np.abs(logits(adapted, tokens) - expected).max() > 1e-3


def test_a_table_that_is_trained_whole_has_no_base():
    adapted = tiny.adapted(base(), modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match="adapters: expected true with modules_to_save, got false"):
        logits(adapted, np.zeros((1, 4), np.int32), adapters=False)
