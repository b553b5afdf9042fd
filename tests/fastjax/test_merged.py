"""A model saved merged says what it said with its adapter, over each kind of base."""

import ml_dtypes
import numpy as np
import pytest

from convert.errors import ConvertError
from convert.quantize import quantize
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from tests.support import tiny

#: float32, logits of a few units; over a 4-bit base the merged weights are rounded to float32 too.
TOLERANCE = 1e-4


@pytest.mark.exhaustive("True")
@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_merged_is_base_plus_adapter(tmp_path, load_in_4bit):
    config = tiny.config(hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    base = tiny.model(tmp_path / "base", config, load_in_4bit=load_in_4bit, new_tokens=["<|tool|>"])
    ours = tiny.adapted(base, target_modules=["q_proj", "down_proj"])
    folder = ours.save_pretrained_merged(tmp_path / "merged", base_in_nf4=load_in_4bit)
    merged = tiny.model(folder, config)
    assert merged.config.vocab_size == base.config.vocab_size == config["vocab_size"] + 1
    tokens = np.stack(tiny.documents({**config, "vocab_size": config["vocab_size"] + 2}, (40, 40)))
    tokens[:, 3] = config["vocab_size"]
    found, expected = tiny.logits(merged, tokens), tiny.logits(ours, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert np.abs(tiny.logits(base, tokens) - expected).max() > 1000 * TOLERANCE, "the adapter does nothing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "merged"]


@pytest.mark.exhaustive("bfloat16")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_a_16_bit_base_in_4_bits_is_the_same_model_however_it_got_there(tmp_path, dtype):
    """Quantised as it was read or by `convert quantize`, decoded, merged: in float32 too, what was trained is kept."""
    config = tiny.config(hidden_size=64, intermediate_size=128, tie_word_embeddings=True, dtype=np.dtype(dtype).name)
    arrays = {name: array.astype(dtype) for name, array in tiny.arrays(config).items()}
    folder = tiny.write_folder(tmp_path / "base", config, arrays)
    base = tiny.model(folder, config, load_in_4bit=True)
    quantize(folder, tmp_path / "packed")
    tokens = np.stack(tiny.documents(config, (40, 40)))
    expected = tiny.logits(base, tokens)
    np.testing.assert_array_equal(
        tiny.logits(tiny.model(tmp_path / "packed", config, load_in_4bit=True), tokens), expected
    )
    decoded = tiny.logits(tiny.model(tmp_path / "packed", config), tokens)
    np.testing.assert_allclose(decoded, expected, rtol=0, atol=TOLERANCE)
    ours = tiny.adapted(base, target_modules=["q_proj", "down_proj"])
    merged = ours.save_pretrained_merged(tmp_path / "merged", base_in_nf4=True, dtype="float32")
    found, expected = tiny.logits(tiny.model(merged, config), tokens), tiny.logits(ours, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_a_scaling_of_positions_goes_along(tmp_path):
    config = tiny.config(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    scaling = {"rope_type": "yarn", "factor": 4.0}
    ours = tiny.adapted(tiny.model(tmp_path / "base", config, rope_scaling=scaling), target_modules=["q_proj"])
    merged = tiny.model(ours.save_pretrained_merged(tmp_path / "merged"), config)
    assert merged.config.rope == ours.config.rope and merged.config.rope.kind == "yarn"
    assert ours.save_pretrained_merged(tmp_path / "merged") == tmp_path / "merged", "a notebook's cell runs again"
    (tmp_path / "merged" / "README.md").write_text("A card of mine.")
    with pytest.raises(ConvertError, match="expected a new one .--force or force=True replaces a model folder"):
        ours.save_pretrained_merged(tmp_path / "merged")


def test_without_an_adapter_it_is_refused(tmp_path):
    base = tiny.model(tiny.shared_folder(tie_word_embeddings=True), tiny.CONFIG)
    with pytest.raises(ConfigError, match="expected an adapter on a model from a folder"):
        base.save_pretrained_merged(tmp_path / "out")


def test_the_adapter_of_a_model_from_the_hub_names_its_commit(tmp_path, monkeypatch):
    from convert.hub import Source

    folder = tiny.shared_folder(tie_word_embeddings=True)
    monkeypatch.setattr("fastjax.execution.opening.fetch", lambda name, revision: Source(folder, name, "1" * 40))
    model, _ = FastLanguageModel.from_pretrained("org/tiny", dtype="float32", max_seq_length=64, load_in_4bit=False)
    adapter = FastLanguageModel.get_peft_model(model, r=2).lora
    assert (adapter.base_model_name_or_path, adapter.revision) == ("org/tiny", "1" * 40)
