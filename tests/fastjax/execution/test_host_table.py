"""An embedding table in the host's memory: the same step, and what it is refused for."""

import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.host_memory import in_host_memory
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.host import has_host_embedding, with_device_embedding, with_host_embedding
from tests.support import steps, tiny

CONFIG = tiny.config(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.model(tmp_path_factory.mktemp("base"), CONFIG)


def test_the_step_is_the_same_bit_for_bit(base):
    model = tiny.adapted(base, target_modules=["q_proj", "down_proj"])
    moved = with_host_embedding(model)
    assert in_host_memory(moved.frozen["embed_tokens"]["weight"])
    assert not in_host_memory(model.frozen["embed_tokens"]["weight"])
    batch = tiny.batches(CONFIG, 1)[0]
    (metrics, grads), (expected, other) = steps.gradients(moved, batch), steps.gradients(model, batch)
    assert metrics["loss"] == expected["loss"]
    for (name, leaf), (_, right) in zip(steps.named(grads).items(), steps.named(other).items(), strict=True):
        np.testing.assert_array_equal(leaf, right, name)


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}])
def test_a_trained_table_stays_on_the_device(base, options):
    model = FastLanguageModel.get_peft_model(base, r=2, **options)
    with pytest.raises(ConfigError, match="offload_embedding: expected false"):
        with_host_embedding(model)


def test_a_tied_table_stays_on_the_device(tmp_path):
    model = tiny.adapted(tiny.model(tmp_path, tiny.config(tie_word_embeddings=True)))
    with pytest.raises(ConfigError, match="tied"):
        with_host_embedding(model)


def test_a_loaded_table_stays_in_the_host_under_adapters(tmp_path):
    folder = tiny.shared_folder(tie_word_embeddings=False)
    options = {"dtype": "float32", "load_in_4bit": False, "new_tokens": ["<new>"]}
    model, _ = FastLanguageModel.from_pretrained(folder, offload_embedding=True, **options)
    fresh = FastLanguageModel.get_peft_model(model, r=2, init_lora_weights=False)
    plain, _ = FastLanguageModel.from_pretrained(folder, **options)
    tokens = np.array([[1, 5, model.new_token_ids[0]]])
    expected = tiny.logits(FastLanguageModel.get_peft_model(plain, r=2, init_lora_weights=False), tokens)
    np.testing.assert_array_equal(tiny.logits(fresh, tokens), expected)

    adapter = fresh.save_pretrained(tmp_path / "adapter")
    bare, _ = FastLanguageModel.from_pretrained(folder, offload_embedding=True, **options | {"new_tokens": None})
    loaded = FastLanguageModel.load_adapter(bare, adapter)  # its table grows
    assert has_host_embedding(model) and has_host_embedding(fresh) and has_host_embedding(loaded)
    assert not has_host_embedding(with_device_embedding(loaded))
    np.testing.assert_array_equal(tiny.logits(loaded, tokens), expected)
