"""Full fine-tuning of a part of a model, and the tokenizer's special tokens: options of loading."""

import jax
import pytest
from safetensors.numpy import load_file

from fastjax.data.tokenizer import load_tokenizer
from fastjax.errors import ConfigError
from fastjax.execution.options import LoadOptions
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.loading import random_model, shapes_of
from tests.support import chat, tiny
from tests.support.family_mixtures import MIXTURES

CONFIG = tiny.config(num_hidden_layers=3, tie_word_embeddings=True)
HOW = {"load_in_4bit": False, "full_finetuning": True, "dtype": "float32"}


def trained(config, *names):
    model = shapes_of(lambda: random_model(config, LoadOptions(unfrozen_parameters=list(names), **HOW)))
    leaves = jax.tree_util.tree_leaves_with_path(model.trainable)
    return model, {".".join(str(key.key) for key in path) for path, _ in leaves}


def test_the_weights_that_are_named_are_trained():
    """The stacks follow: the layers of one are trained alike; a tied table is one constant."""
    model, names = trained(CONFIG, r"model\.layers\.-1\.mlp", "model.norm")
    assert [(stack.start, stack.count) for stack in model.plan] == [(0, 2), (2, 1)]
    assert names == {"norm.weight", *(f"layers.1.0.mlp.{part}.weight" for part in ("gate_up", "down"))} | {
        name for name in names if name.endswith("bias")
    }
    assert sum(leaf.size for leaf in jax.tree.leaves((model.trainable, model.frozen))) == model.num_parameters()[1]
    _, names = trained(MIXTURES["mixtral"], "model.layers.[01].*(experts|gate)")
    assert names and all("mlp." in name for name in names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["model.layers.9"],
            "unfrozen_parameters: 'model.layers.9': expected the beginning of a name, got one that none",
        ),
        (["("], "unfrozen_parameters: expected regular expressions, got"),
        (
            ["model.layers.0.self_attn.q"],
            "expected all or none of model.layers.0.self_attn.q_proj.weight, model.layers.0",
        ),
    ],
)
def test_names_that_are_none(names, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        trained(CONFIG, *names)
    with pytest.raises(ConfigError, match="expected null without full_finetuning: true, got some"):
        FastLanguageModel.from_config(CONFIG, unfrozen_parameters=names)


def test_special_tokens(tmp_path):
    folder = chat.write_model(tmp_path / "tiny")
    how = HOW | {"unfrozen_parameters": ["model.norm"]}
    model, tokenizer = FastLanguageModel.from_pretrained(folder, special_tokens_map={"eos_token": "<unk>"}, **how)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<unk>", "<s>")
    model = model.replace(trainable=jax.tree.map(lambda leaf: leaf + 1, model.trainable))
    model.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").eos_token == "<unk>"
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "saved"))
    assert [name for name, array in before.items() if (array != after[name]).any()] == ["model.norm.weight"]
    with pytest.raises(
        ConfigError, match="special_tokens_map: expected tokens that the tokenizer has, got eos_token: '<e>'"
    ):
        FastLanguageModel.from_pretrained(folder, special_tokens_map={"eos_token": "<e>"})
