"""Logits equal transformers' in float32, with every field of the config off its default."""

import dataclasses

import numpy as np
import pytest

from tests.support import tiny

torch = pytest.importorskip("torch")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = pytest.mark.torch

#: float32 through three layers, logits of a few units; measured: 4e-6.
TOLERANCE = 1e-4

#: Fields of LlamaConfig that do not say what the model computes, each with the reason.
IRRELEVANT = {
    "transformers_version": "of the writer",
    "architectures": "class name",
    "output_hidden_states": "what transformers returns",
    "return_dict": "how transformers returns it",
    "dtype": "of the stored weights, which say it themselves",
    "chunk_size_feed_forward": "memory in transformers",
    "is_encoder_decoder": "never for Llama",
    "id2label": "classification",
    "label2id": "classification",
    "problem_type": "classification",
    "model_type": "chooses the class",
    "_name_or_path": "where it came from",
    "output_attentions": "what transformers returns",
    "attention_dropout": "drawn by each library in its own way: tests of the models",
}


def test_every_field_is_off_its_default():
    from transformers import LlamaConfig

    default, used = LlamaConfig().to_dict(), LlamaConfig(**tiny.CONFIG).to_dict()
    fields = {field.name for field in dataclasses.fields(LlamaConfig)} | set(default)
    compared = fields - set(IRRELEVANT)
    same = sorted(name for name in compared if default.get(name) == used.get(name))
    assert not same, f"these fields are at LlamaConfig's default and prove nothing: {same}"
    assert used["head_dim"] * used["num_attention_heads"] != used["hidden_size"]
    assert set(tiny.ROPE) >= set(default["rope_parameters"])


VARIANTS = {
    "every field": {},
    "one key head": {"num_key_value_heads": 1},
    "a key head for every head": {"num_key_value_heads": 4},
    "untied": {"tie_word_embeddings": False},
    "attention bias only": {"mlp_bias": False},
    "mlp bias only": {"attention_bias": False},
    "default rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 321.0}},
    "silu": {"hidden_act": "silu"},
    "gelu": {"hidden_act": "gelu"},
    "relu": {"hidden_act": "relu"},
    "head_dim of hidden_size": {"head_dim": 12},
    "width not of whole blocks": {"hidden_size": 40, "intermediate_size": 56, "head_dim": 18, "vocab_size": 107},
}


UNROLLED = ("every field", "one key head", "a key head for every head", "untied")


@pytest.mark.exhaustive(
    *("every field-scan", "every field-unroll", "one key head-scan", "a key head for every head-scan", "untied-scan"),
    *("mlp bias only-scan", "head_dim of hidden_size-scan", "width not of whole blocks-scan"),
)
@pytest.mark.parametrize(("variant", "layer_loop"), [(v, "scan") for v in VARIANTS] + [(v, "unroll") for v in UNROLLED])
def test_logits(variant, layer_loop, tmp_path):
    """Rows of one document and of several with padding."""
    config = tiny.config(**VARIANTS[variant])
    arrays = tiny.arrays(config, seed=len(variant))
    tiny.write_folder(tmp_path, config, arrays)
    tokens, _, segments, positions = tiny.rows([tiny.documents(config, (90,)), tiny.documents(config, (31, 1, 50))], 90)
    expected = torch_llama.logits(torch_llama.build(config, arrays), tokens, positions, segments)
    assert expected.std() > 0.5
    model = tiny.model(tmp_path, config, layer_loop=layer_loop)
    ours = tiny.logits(model, tokens, positions, segments)
    np.testing.assert_allclose(ours[segments > 0], expected[segments > 0], rtol=0, atol=TOLERANCE)


SMALL_CHANGES = {
    "hidden_act": {"hidden_act": "gelu"},
    "rms_norm_eps": {"rms_norm_eps": 1e-6},
    **{
        name: {"rope_parameters": {**tiny.ROPE, name: tiny.ROPE[name] * 2}} for name in tiny.ROPE if name != "rope_type"
    },
    "attention_bias": {"attention_bias": False},
    "mlp_bias": {"mlp_bias": False},
}


@pytest.mark.parametrize("field", SMALL_CHANGES)
def test_the_comparison_would_notice(field):
    """Each field moves the reference's logits by more than ten tolerances."""
    config, changed = tiny.config(), tiny.config(**SMALL_CHANGES[field])
    arrays = tiny.arrays(config)
    kept = {name: arrays[name] for name in tiny.arrays(changed)}
    tokens = np.stack(tiny.documents(config, (90, 90)))
    before, after = (
        torch_llama.logits(torch_llama.build(c, a), tokens) for c, a in ((config, arrays), (changed, kept))
    )
    assert np.abs(before - after).max() > 10 * TOLERANCE
