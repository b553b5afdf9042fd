"""`fastjax import-config` drops no key in silence where two of them make one setting, or one is empty."""

import json

import pytest
import yaml

from tests.support.other_tools import AXOLOTL, INFO, LLAMA_FACTORY, TORCHTUNE, lists

#: A file, what is added to it, and the keys that the answer names.
FILES = {
    "a revision": (AXOLOTL, {"revision_of_model": "v2"}, ["base_model", "revision_of_model"]),
    "a second tracker": (AXOLOTL, {"use_tensorboard": True}, ["wandb_project", "use_tensorboard"]),
    "a tracker that is off": (AXOLOTL, {"use_tensorboard": False}, ["use_tensorboard"]),
    "tokens both ways": (
        AXOLOTL,
        {"special_tokens": {"additional_special_tokens": ["<a>"]}, "tokens": ["<b>"]},
        ["special_tokens.additional_special_tokens", "tokens"],
    ),
    "empty tokens": (AXOLOTL, {"special_tokens": {}}, ["special_tokens"]),
    "two ways to add tokens": (
        LLAMA_FACTORY,
        {"add_tokens": "<a>", "add_special_tokens": "<b>"},
        ["add_tokens", "add_special_tokens"],
    ),
    "two ways to warm up": (AXOLOTL, {"warmup_ratio": 0.1}, ["warmup_steps", "warmup_ratio"]),
    "shares of data that are read whole": (LLAMA_FACTORY, {"interleave_probs": "0.5,0.5"}, ["interleave_probs"]),
    "a component that is the one there is": (TORCHTUNE, {}, ["checkpointer._component_", "loss._component_"]),
    "two ways to learn": (LLAMA_FACTORY, {"train_on_prompt": True}, ["train_on_prompt", "mask_history"]),
}


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_named(name, imported, tmp_path):
    text, added, keys = FILES[name]
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    _, out = imported(yaml.safe_load(text) | added)
    named = [key for keys in lists(out).values() for key in keys]
    assert set(keys) <= set(named), out
