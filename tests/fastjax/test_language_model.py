"""The entry points: what they count, save and refuse."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import fastjax
from convert.card import Training
from convert.checkpoint import open_checkpoint
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.hub import push_to_hub
from tests.support import steps, tiny


@pytest.fixture(scope="module")
def base():
    return tiny.model(tiny.shared_folder(), tiny.CONFIG)


def test_parameters_are_counted(base):
    weights = sum(array.size for array in tiny.arrays(tiny.CONFIG).values())
    assert base.num_parameters() == (0, weights)
    adapted = FastLanguageModel.get_peft_model(base, r=4, target_modules=["q_proj", "down_proj"])
    added = 3 * 4 * ((48 + 64) + (72 + 48))
    assert adapted.num_parameters() == (added, weights + added)
    full = tiny.model(tiny.shared_folder(), tiny.CONFIG, full_finetuning=True)
    assert full.num_parameters() == (weights, weights)


@pytest.mark.exhaustive("scan-True", "unroll-False")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_a_fully_trained_model_is_saved_under_the_checkpoints_names(tmp_path, tied, layer_loop):
    config = tiny.config(tie_word_embeddings=tied)
    folder = tiny.shared_folder(tie_word_embeddings=tied)
    model = tiny.model(folder, config, full_finetuning=True, layer_loop=layer_loop)
    moved = model.replace(trainable=jax.tree.map(lambda leaf: leaf + 1, model.trainable))
    moved.save_pretrained(tmp_path / "saved")
    saved, original = open_checkpoint(tmp_path / "saved"), open_checkpoint(folder)
    assert saved.names == original.names and saved.config == original.config
    for name in saved.names:
        assert np.array_equal(saved.read(name), original.read(name) + np.float32(1)), name
    again = tiny.model(tmp_path / "saved", config, full_finetuning=True, layer_loop=layer_loop)
    steps.assert_same(again.trainable, moved.trainable)


def test_an_adapter_does_not_touch_the_model_that_it_was_made_from(base):
    before = jax.device_get(jax.tree.leaves(base.frozen))
    adapted = FastLanguageModel.get_peft_model(base, r=4, use_gradient_checkpointing="none")
    assert base.lora is None and base.execution.remat == "full" and adapted.execution.remat == "none"
    assert not jax.tree.leaves(base.trainable) and jax.tree.leaves(adapted.trainable)
    after = jax.device_get(jax.tree.leaves(base.frozen))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_gradient_checkpointing_has_an_effect(base):
    """The remat setting given with the adapter reaches the decoder."""
    made = [
        FastLanguageModel.get_peft_model(base, r=4, use_gradient_checkpointing=value).module().executor.remat
        for value in (False, "none")
    ]
    assert made == ["projections", "none"]


def test_order_of_calls(base, tmp_path):
    with pytest.raises(ConfigError, match="nothing is trained"):
        base.save_pretrained(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    adapted = FastLanguageModel.get_peft_model(base, r=4)
    with pytest.raises(ConfigError, match="without an adapter"):
        FastLanguageModel.get_peft_model(adapted, r=2)
    full = tiny.model(tiny.shared_folder(), tiny.CONFIG, full_finetuning=True)
    with pytest.raises(ConfigError, match="full_finetuning"):
        FastLanguageModel.get_peft_model(full, r=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "^r: expected a positive integer, got 0"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected .* got 'pissa'"),
        ({"random_state": -1}, "^random_state: expected an integer from 0 to 4294967295, got -1$"),
        ({"bias": "all"}, "bias: expected 'none', got 'all'"),
        ({"modules_to_save": ["norm"]}, "modules_to_save: expected some of .* got .*norm"),
        ({"target_modules": ["nothing"]}, "target_modules: .*nothing.* matches no module"),
        ({"lora_dropout": 1.0}, "lora_dropout: expected a number from 0 to below 1, got 1.0"),
    ],
)
def test_adapter_settings_that_are_refused(base, options, message):
    with pytest.raises(ConfigError, match=message):
        FastLanguageModel.get_peft_model(base, **{"r": 4, **options})


def test_what_is_no_model_is_refused(base):
    for given, kind in (((base, None), "tuple"), ("a folder", "str")):
        with pytest.raises(ConfigError, match=f"^model: expected .* got a {kind}; load it by model, tokenizer = Fast"):
            FastLanguageModel.get_peft_model(given, use_gradient_checkpointing=True)


@pytest.mark.parametrize(("end", "named"), [("<|eot_id|>", None), ("<|end_header_id|>", [1, 4, 3])])
def test_an_end_that_the_base_does_not_name_is_saved_and_said(tmp_path, capsys, end, named):
    """With the adapter, and in the merged model."""
    source = Path(fastjax.__file__).parent / "assets" / "tiny-llama"
    model = FastLanguageModel.get_peft_model(FastLanguageModel.from_pretrained(source)[0], r=2)
    assert model.tokenizer is not None
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}" + end + "{% endfor %}"
    model.save_pretrained(tmp_path / "adapter")
    model.save_pretrained_merged(tmp_path / "merged")
    assert (end in capsys.readouterr().err) == (named is not None)
    files = [tmp_path / folder / "generation_config.json" for folder in ("adapter", "merged")]
    assert [json.loads(file.read_text())["eos_token_id"] if file.exists() else None for file in files] == [named] * 2


@pytest.mark.parametrize("there", [None, "A card of mine."])
def test_what_is_uploaded_has_a_card_unless_the_repository_has_its_own(base, tmp_path, monkeypatch, capsys, there):
    import huggingface_hub

    uploaded = {}

    class Hub:
        def __init__(self, token=None):
            assert token == "secret"

        def create_repo(self, name, *, private, exist_ok):
            assert (name, private, exist_ok) == ("me/tuned", True, True)

        def file_exists(self, name, file):
            return there is not None

        def hf_hub_download(self, name, file):
            (tmp_path / file).write_text(there)
            return str(tmp_path / file)

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            uploaded.update({path.name: path.read_bytes() for path in folder_path.iterdir()})
            return f"commit of {repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    model = FastLanguageModel.get_peft_model(base, r=4, target_modules=["q_proj"])
    model = model.replace(training=Training("| steps | 3 |", ("org/data",)))
    assert push_to_hub(model, "me/tuned", token="secret", private=True) == "commit of me/tuned"
    assert "adapter_model.safetensors" in uploaded
    with pytest.raises(ConfigError, match="repo_id: expected organisation/name, or a name, got 'me/a b'"):
        push_to_hub(model, "me/a b", token="secret")
    if there is None:
        card = uploaded["README.md"].decode()
        assert 'PeftModel.from_pretrained(model, "me/tuned")' in card and "--adapter me/tuned" in card
        assert f"trained over `{model.base.name}` in {model.base.kind}" in card
        assert "fastjax chat" not in card and " me/tuned tuned-merged" in card
        assert "datasets:\n- org/data\n" in card and card.endswith("## Training\n\n| steps | 3 |\n")
    else:
        assert "README.md" not in uploaded and "me/tuned has a README.md that is not" in capsys.readouterr().err
    assert model.replace(trainable=model.trainable).training is None, "of other arrays no run is known"
