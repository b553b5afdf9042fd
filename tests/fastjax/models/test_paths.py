"""What a run says of the way in which each module is computed, and why."""

import jax.numpy as jnp

from fastjax.models.paths import adapter_paths
from tests.support import tiny
from tests.support.aot import AOT, needs_cuda_plugin

SHAPE = {"tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 128}


def lines(tokens=128, load=None, **options):
    base = tiny.model(tiny.shared_folder(**SHAPE), tiny.config(**SHAPE), **(load or {}))
    model = tiny.adapted(base, **options)
    return [path.text for path in adapter_paths(model.graphdef, model.trainable, model.frozen, tokens)]


def test_every_group_of_a_plain_adapter_is_one_unit():
    qkv, o, mlp = lines(load={"load_in_4bit": True})
    assert qkv.startswith("self_attn.q_proj, k_proj, v_proj: one unit of NF4 weights and adapters of rank 4 on ")
    assert "apart from the turn of the heads: a bias, a norm or a limit comes between projection and turn" in qkv
    assert o == "self_attn.o_proj: one unit of NF4 weights and adapters of rank 4 on o_proj"
    assert mlp.startswith("mlp.gate_proj, up_proj, down_proj: one unit of NF4 weights")
    assert "the gated product by xla (triton: it needs an NVIDIA GPU of compute capability 8.0 or more" in mlp


def test_what_is_apart_says_why_and_in_which_layers():
    found = lines(use_dora=True, lora_dropout=0.1, rank_pattern={"layers.1.mlp.up_proj": 2})
    gate_up = [line for line in found if line.startswith("mlp.gate_proj, up_proj")]
    assert [line.rpartition(" (")[2] for line in gate_up] == ["layers 0, 2)", "layers 1)"]
    assert all(
        "not one unit with the rest of the block: DoRA scales the projections' results" in line for line in gate_up
    )
    assert "rank 2, 4" in gate_up[1] and all("DoRA; dropout, with an input each" in line for line in found)


def test_projections_without_an_adapter_and_tables():
    found = lines(target_modules=["q_proj", "embed_tokens", "lm_head"])
    assert "mlp.down_proj: product with float32 weights; no adapter is on it" in found
    assert found[-2] == "embed_tokens: rows of the table and of its adapter, added"
    assert found[-1] == "lm_head: one unit of float32 weights and adapters of rank 4 on lm_head"


def test_parts_in_several_dtypes():
    found = lines(
        load={"dtype": "bfloat16", "float32_modules": ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"]}
    )
    assert any(
        "a unit each" in line
        and "q_proj is computed in float32, the rest in bfloat16; " in line
        and line.endswith("(layers 0)")
        for line in found
    )
    assert any("its projections are computed in different dtypes (layers 1)" in line for line in found)


@needs_cuda_plugin
def test_on_a_gpu_the_kernel_is_named():
    shape = {**SHAPE, "attention_bias": False, "head_dim": 32}
    base = tiny.adapted(tiny.model(tiny.shared_folder(**shape), tiny.config(**shape), dtype="bfloat16"))
    assert base.dtype == jnp.bfloat16
    with AOT("h200").tracing():
        heads, _, mlp = adapter_paths(base.graphdef, base.trainable, base.frozen, 128)
        *_, odd = adapter_paths(base.graphdef, base.trainable, base.frozen, 100)
    # its biases are one more column of rank 4
    assert mlp.text.endswith("the gated product by triton")
    assert heads.text.endswith("its sums, turned heads, by triton")
    assert odd.text.endswith("by xla (triton: it takes whole tiles of 64, not 100 tokens by 128 features)")
    assert [heads.slower, mlp.slower, odd.slower] == [False, False, True]
