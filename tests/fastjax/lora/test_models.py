"""Whole models with units equal the same models with plain LoRA: loss and every gradient, for every option."""

import jax
import numpy as np
import pytest

from tests.fastjax.lora.conftest import distance
from tests.support import device_steps, plain_lora, steps, tiny

EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
#: (how the model is loaded, the adapter)
CASES = {
    "everything, with biases": ({}, {"target_modules": EVERYTHING}),
    "everything, unrolled": ({"layer_loop": "unroll"}, {"target_modules": EVERYTHING}),
    "NF4": ({"load_in_4bit": True}, {}),
    "dropout and rsLoRA": ({}, {"lora_dropout": 0.3, "use_rslora": True, "target_modules": EVERYTHING}),
    "DoRA": ({}, {"use_dora": True, "target_modules": EVERYTHING}),
    "DoRA with dropout on NF4": (
        {"load_in_4bit": True},
        {"use_dora": True, "lora_dropout": 0.3, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    ),
    "a subset": ({}, {"target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "down alone": ({"load_in_4bit": True}, {"target_modules": ["down_proj"]}),
    "ranks and alphas of their own": (
        {},
        {
            "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 7, "down_proj": 3},
            "alpha_pattern": {"o_proj": 5, "gate_proj": 1},
        },
    ),
    "parts in float32": ({"dtype": "bfloat16", "float32_modules": ["q_proj", "layers.1.mlp.down_proj", "lm_head"]}, {}),
    "whole tables beside": ({}, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "rows of tokens beside": ({}, {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [4]}}),
    "kept: nothing": ({"use_gradient_checkpointing": True}, {"target_modules": EVERYTHING}),
    "kept: projections": ({"use_gradient_checkpointing": "projections"}, {"lora_dropout": 0.3}),
    "kept: everything": ({"use_gradient_checkpointing": False}, {}),
    "no biases": ({"use_gradient_checkpointing": "projections"}, {}),
    "no biases, a subset on NF4": ({"load_in_4bit": True}, {"target_modules": ["k_proj", "up_proj", "o_proj"]}),
    "no biases, dropout": ({}, {"lora_dropout": 0.3}),
}
#: Without them the projection to heads is one unit as far as attention.
NO_BIASES = {"attention_bias": False, "mlp_bias": False}


# Units are held against plain LoRA with each option in test_linear.py and test_mlp.py; here is what lies between them.
@pytest.mark.exhaustive(
    "rows of tokens beside",
    "no biases, a subset on NF4",
)
@pytest.mark.parametrize("name", CASES)
def test_units_equal_plain_lora(name, monkeypatch):
    load, options = CASES[name]
    load = {"dtype": "float32", **load}
    shape = {"tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 128}
    shape |= NO_BIASES if name.startswith("no biases") else {}
    model = tiny.adapted(tiny.model(tiny.shared_folder(**shape), tiny.config(**shape), **load), **options)
    [batch] = tiny.batches(tiny.CONFIG, 1)
    batch = jax.tree.map(np.asarray, batch)
    found, exact = steps.gradients(model, batch), None
    if load["dtype"] == "bfloat16":
        exact = steps.gradients(device_steps.in_dtype(model, "float32"), batch)
    steps.recording_step.cache_clear()
    plain_lora.everywhere(monkeypatch)
    with jax.default_matmul_precision("highest"):  # float32's own on a CPU, and a context whose traces are its own
        expected = steps.gradients(model, batch)
    steps.recording_step.cache_clear()
    if exact is not None:  # the units round less often: nearer to float32 in all, and not much farther anywhere
        errors = np.asarray([distance(each[1], exact[1]) for each in (found, expected)])
        assert errors.max() < 0.05 and np.median(errors[0] / errors[1]) < 1, errors
        assert (errors[0] < 1.3 * errors[1]).all(), errors
        assert found[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-3)
        return
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-6)
    # float32, through three layers
    steps.assert_close(found[1], expected[1], 2e-5)
