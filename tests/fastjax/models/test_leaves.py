"""What a trained array is, over the trees of every family, adapters and trained tables included."""

import jax
import pytest

from fastjax.language_model import FastLanguageModel
from fastjax.models.leaves import VECTORS, leaf_at
from tests.support import families, tiny


def leaves(tree):
    return [(leaf_at(path), array) for path, array in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "cohere", "smollm3", "qwen2_moe", "gpt_oss"])
def test_kinds_are_those_of_the_specs(family, tmp_path):
    model = tiny.model(tmp_path, (families.CONFIGS | families.MIXTURES)[family], full_finetuning=True)
    found = {}
    for leaf, array in leaves(model.trainable):
        stacked = leaf.stack is not None and model.plan[leaf.stack].count > 1
        count = model.plan[leaf.stack].count if leaf.stack is not None else 1
        found[leaf.kind] = found.get(leaf.kind, 0) + array.size
        assert array.shape[0] == count or not stacked
        assert leaf.is_vector == (leaf.kind in VECTORS)
        assert leaf.of_experts == ("mlp.experts" in leaf.name)
    wanted = {}
    for spec in model.config.specs:
        size = 1
        for dimension in spec.shape:
            size *= dimension
        wanted[spec.kind] = wanted.get(spec.kind, 0) + size
    assert found == wanted


def test_kinds_of_an_adapter():
    model = tiny.model(tiny.shared_folder(tie_word_embeddings=False), tiny.CONFIG)
    options = {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True}
    found = {leaf.name: leaf for leaf, _ in leaves(FastLanguageModel.get_peft_model(model, r=2, **options).trainable)}
    kinds = {name: leaf.kind for name, leaf in found.items()}
    q = "layers.0.0.self_attn.qkv.adapters.q_proj"
    assert {kinds[f"{q}.{kind}"] == kind for kind in ("lora_A", "lora_B", "magnitude")} == {True}
    assert found[f"{q}.lora_A"].in_layer(5) == "layers.5.self_attn.qkv.adapters.q_proj.lora_A"
    assert kinds["embed_tokens.adapter.lora_embedding_B"] == "lora_embedding_B"
    assert found["embed_tokens.adapter.lora_embedding_B"].of_table
    assert not found["lm_head.adapters.lm_head.lora_B"].of_table and not found[f"{q}.lora_B"].of_table
