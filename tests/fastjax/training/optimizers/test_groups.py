"""Rates, decay and stacks by the names of weights, on the trees that models have."""

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.language_model import FastLanguageModel
from fastjax.models.leaves import leaf_at
from fastjax.training.optimizers import OptimizerConfig, decays, group_factors, make_optimizer, rate_groups
from fastjax.training.optimizers.groups import stack_dims
from tests.support import tiny


def trainable(**options):
    model = tiny.model(tiny.shared_folder(tie_word_embeddings=False), tiny.CONFIG)
    return FastLanguageModel.get_peft_model(model, r=4, **options).trainable


def named(tree):
    return {leaf_at(path).name: leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def rate_factors(config, tree):
    """The factor of the schedule's rate for each weight."""
    factors = group_factors(config)
    return {name: factors[group] for name, group in named(rate_groups(tree)).items()}


def test_vectors_do_not_decay_even_when_stacked():
    stacked = jnp.ones((5, 4))
    projection = {"weight": stacked, "bias": stacked, "magnitude": stacked}
    tree = {
        "embed_tokens": stacked,
        "layers": {0: {0: {"input_layernorm": {"weight": stacked}, "self_attn": {"qkv": projection}}}},
        "norm": {"weight": jnp.ones(4)},
    }
    decaying = {"weight": True, "bias": False, "magnitude": False}
    expected = {
        "embed_tokens": True,
        "layers": {0: {0: {"input_layernorm": {"weight": False}, "self_attn": {"qkv": decaying}}}},
        "norm": {"weight": False},
    }
    assert decays(tree) == expected
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), 10)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    updates, _ = optimizer.update(zeros, optimizer.init(tree), tree)
    assert jax.tree.map(lambda u: bool(jnp.any(u != 0)), updates) == expected


def test_no_decay_names_parts_of_names():
    tree = trainable(target_modules=["q_proj", "down_proj"], use_dora=True)
    mask = named(decays(tree, ["lora_A", "mlp.down"]))
    assert {name for name, decay in mask.items() if decay} == {
        f"layers.0.0.self_attn.qkv.adapters.q_proj.{part}" for part in ("lora_B", "magnitude")
    }


def test_rates_of_loraplus_and_of_embeddings():
    config = OptimizerConfig(learning_rate=2e-4, loraplus_lr_ratio=16.0, embedding_learning_rate=1e-5)
    tree = trainable(target_modules=["q_proj", "embed_tokens", "lm_head"], use_dora=True)
    expected = {
        "embed_tokens.adapter.lora_embedding_A": 0.05,
        "embed_tokens.adapter.lora_embedding_B": 0.05,
        "embed_tokens.adapter.magnitude": 0.05,
        "layers.0.0.self_attn.qkv.adapters.q_proj.lora_A": 1.0,
        "layers.0.0.self_attn.qkv.adapters.q_proj.lora_B": 16.0,
        "layers.0.0.self_attn.qkv.adapters.q_proj.magnitude": 1.0,
        "lm_head.adapters.lm_head.lora_A": 1.0,
        "lm_head.adapters.lm_head.lora_B": 16.0,
        "lm_head.adapters.lm_head.magnitude": 1.0,
    }
    found = rate_factors(config, tree)
    assert found.keys() == expected.keys()
    for name, factor in expected.items():
        np.testing.assert_allclose(found[name], factor, rtol=1e-12, err_msg=name)
    without = rate_factors(OptimizerConfig(loraplus_lr_ratio=16.0), tree)
    assert without["embed_tokens.adapter.lora_embedding_B"] == 16.0
    assert without["embed_tokens.adapter.lora_embedding_A"] == 1.0
    assert set(rate_factors(OptimizerConfig(), tree).values()) == {1.0}


def test_whole_embeddings_have_their_rate():
    config = OptimizerConfig(learning_rate=1e-3, loraplus_lr_ratio=4.0, embedding_learning_rate=1e-4)
    found = rate_factors(config, trainable(modules_to_save=["embed_tokens", "lm_head"]))
    assert {name for name, factor in found.items() if factor == 0.1} == {"embed_tokens.weight", "lm_head.weight"}
    rows = {"embed_tokens": {"tokens": {"trainable_tokens_delta": jnp.ones((2, 48))}}}
    assert set(rate_factors(config, rows).values()) == {0.1}


def test_rates_multiply_direction_and_decay():
    """Adam's first direction is the gradient's sign, so that an update shows the rate; the decay has it as well."""
    config = OptimizerConfig(
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        loraplus_lr_ratio=8.0,
        embedding_learning_rate=1e-3,
        weight_decay=0.5,
        max_grad_norm=0.0,
    )
    tree = {
        "embed_tokens": {"weight": jnp.full((3, 2), 2.0)},
        "q_proj": {"lora_A": jnp.full((2, 3), 2.0), "lora_B": jnp.full((3, 2), 2.0), "bias": jnp.full((3,), 2.0)},
    }
    optimizer = make_optimizer(config, 10)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, tree), optimizer.init(tree), tree)
    first = {name: float(u.reshape(-1)[0]) for name, u in named(updates).items()}
    expected = {"embed_tokens.weight": -2e-3, "q_proj.lora_A": -2e-2, "q_proj.lora_B": -16e-2, "q_proj.bias": -1e-2}
    for name, value in expected.items():
        np.testing.assert_allclose(first[name], value, rtol=1e-5, err_msg=name)  # float32


def test_stacks_are_told_by_names():
    model = tiny.model(tiny.shared_folder(tie_word_embeddings=False), tiny.CONFIG, full_finetuning=True)
    trees = [model.trainable, trainable(use_dora=True, target_modules=["q_proj", "embed_tokens"])]
    for tree in trees:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            stacked = leaf_at(path).name.startswith("layers.")
            assert stack_dims(path, leaf) == int(stacked), leaf_at(path).name
    loose = tiny.model(
        tiny.shared_folder(tie_word_embeddings=False), tiny.CONFIG, full_finetuning=True, layer_loop="unroll"
    )
    for path, leaf in jax.tree_util.tree_flatten_with_path(loose.trainable)[0]:
        assert stack_dims(path, leaf) == 0, leaf_at(path).name
