"""Tiny model folders, one for each family that GGUF supports."""

import copy
import json

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from convert.families import family_for
from tests.support.folders import write_checkpoint

TEMPLATE = "{{ messages }}"
HEADS, KEY_HEADS, SIZE, LAYERS = 4, 2, 16, 2
SIZES = {
    "vocab_size": 263,
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 192,
    "rms_norm_eps": 3e-2,
    "tie_word_embeddings": False,
    "bos_token_id": 258,
    "eos_token_id": 259,
    "pad_token_id": 262,
}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5}}
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_NORMS = ("cohere", "cohere2", "nemotron", "phi", "starcoder2", "olmo")
GEMMA3_LAYERS = 7
GEMMA3 = {
    "num_hidden_layers": GEMMA3_LAYERS,
    "sliding_window": 24,
    "query_pre_attn_scalar": SIZE,
    "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
    "rope_parameters": {
        FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 50.0},
    },
}
LONG, SHORT = [1.5, 3.0, 6.0, 7.0, 8.0, 9.0], [1.0, 1.2, 1.5, 1.6, 1.7, 1.8]
LONGROPE = {"rope_type": "longrope", "rope_theta": 300.0, "long_factor": LONG, "short_factor": SHORT}
#: Layers with Gated DeltaNet: four heads of values of 16, two for each head of keys.
DELTA = LINEAR | {
    **{"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 12, "linear_value_head_dim": 16},
}
DELTA_KEYS = {
    **{"full_attention_interval": 2, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.state_size": 12},
    **{"ssm.inner_size": 64, "ssm.conv_kernel": 4, "rope.dimension_count": 4},
    "rope.dimension_sections": [11, 11, 10, 0],
}
DELTA_EXPERTS = {
    **{"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "shared_expert_intermediate_size": 64,
}
#: Model with a text section -> fields there.
TEXTS = {
    "qwen3_5": DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": DELTA | DELTA_EXPERTS | {"model_type": "qwen3_5_moe_text"},
    "gemma3": GEMMA3 | {"model_type": "gemma3_text"},
    "mistral3": {"model_type": "mistral", "sliding_window": None},
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
EXPERT_KEYS = {"expert_count": 5, "expert_used_count": 3, "expert_feed_forward_length": 32}
#: model_type -> fields of config.json, architecture, keys under it.
FAMILY_CASES = {
    "llama": ({"attention_bias": True, "mlp_bias": True} | LINEAR, "llama", {"rope.scaling.factor": 1.5}),
    "mistral": (LINEAR | {"sliding_window": None}, "llama", {"rope.freq_base": 300.0}),
    "qwen2": ({"rope_theta": 300.0}, "qwen2", {"rope.freq_base": 300.0}),
    "qwen3": (LINEAR, "qwen3", {"rope.scaling.type": "linear", "attention.key_length": SIZE}),
    "gemma": (
        {"tie_word_embeddings": True, "hidden_act": "gelu", "head_dim": 24},
        "gemma",
        {"attention.key_length": 24, "rope.dimension_count": 24, "rope.freq_base": 10000.0},
    ),
    "gemma2": (
        {
            "tie_word_embeddings": True,
            "sliding_window": 24,
            "query_pre_attn_scalar": SIZE,
            "layer_types": [SLIDING, FULL],
            "attn_logit_softcapping": 7.0,
            "final_logit_softcapping": 6.0,
        },
        "gemma2",
        {"attention.sliding_window": 24, "attn_logit_softcapping": 7.0, "final_logit_softcapping": 6.0},
    ),
    "gemma3_text": (
        GEMMA3,
        "gemma3",
        {
            "attention.sliding_window": 24,
            "rope.freq_base": 900.0,
            "rope.freq_base_swa": 50.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "mistral3": ({}, "llama", {"rope.freq_base": 1e4}),
    "gemma3": ({}, "gemma3", {"attention.sliding_window": 24, "rope.freq_base": 900.0}),
    "phi3": (
        {
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE,
        },
        "phi3",
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": (1 + np.log(3) / np.log(64)) ** 0.5,
            "attention.sliding_window": 0,
        },
    ),
    "qwen3_5_text": (DELTA, "qwen35", DELTA_KEYS),
    "qwen3_5": ({}, "qwen35", DELTA_KEYS),
    "qwen3_5_moe_text": (DELTA | DELTA_EXPERTS, "qwen35moe", DELTA_KEYS | EXPERT_KEYS),
    "qwen3_5_moe": ({}, "qwen35moe", DELTA_KEYS | EXPERT_KEYS),
    "olmo2": (LINEAR, "olmo2", {"rope.freq_base": 300.0}),
    "granite": (
        {
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.8,
        },
        "granite",
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 0.8},
    ),
    "cohere": (
        {"tie_word_embeddings": True, "logit_scale": 1.7, "layer_norm_eps": 3e-2},
        "command-r",
        {"logit_scale": 1.7, "attention.layer_norm_epsilon": 3e-2, "rope.freq_base": 5e5, "rope.scaling.type": "none"},
    ),
    "starcoder2": (
        LINEAR | {"norm_epsilon": 3e-2, "hidden_act": "gelu_pytorch_tanh"},
        "starcoder2",
        {"attention.layer_norm_epsilon": 3e-2, "rope.scaling.factor": 1.5},
    ),
    "olmo": ({"clip_qkv": 8.0}, "olmo", {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 8.0}),
    "smollm3": ({}, "smollm3", {"rope.freq_base": 2e6}),
    "glm4": (LINEAR, "glm4", {"rope.dimension_count": SIZE // 2, "rope.scaling.factor": 1.5}),
    "ernie4_5": (LINEAR, "ernie4_5", {"rope.freq_base": 300.0}),
    "cohere2": (
        {
            "tie_word_embeddings": True,
            "logit_scale": 1.7,
            "layer_norm_eps": 3e-2,
            "sliding_window": 24,
            "layer_types": [SLIDING] * 3 + [FULL],
            "num_hidden_layers": 4,
        },
        "cohere2",
        {"logit_scale": 1.7, "attention.layer_norm_epsilon": 3e-2, "attention.sliding_window": 24},
    ),
    "nemotron": (
        {"attention_bias": True, "mlp_bias": True, "norm_eps": 3e-2},
        "nemotron",
        {"attention.layer_norm_epsilon": 3e-2, "rope.dimension_count": SIZE // 2, "rope.scaling.type": "none"},
    ),
    "phi": (
        {"layer_norm_eps": 3e-2, "num_key_value_heads": HEADS, "partial_rotary_factor": 0.25},
        "phi2",
        {"attention.layer_norm_epsilon": 3e-2, "rope.dimension_count": 4, "attention.head_count_kv": HEADS},
    ),
    "mixtral": (
        LINEAR | {"num_local_experts": 5},
        "llama",
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 96},
    ),
    "minimax_m2": (
        LINEAR | {"num_local_experts": 5, "num_experts_per_tok": 3, "rotary_dim": 8},
        "minimax-m2",
        {"expert_count": 5, "expert_used_count": 3, "expert_gating_func": 2, "rope.dimension_count": 8},
    ),
    "qwen2_moe": (
        EXPERTS | {"shared_expert_intermediate_size": 64},
        "qwen2moe",
        EXPERT_KEYS | {"expert_shared_feed_forward_length": 64},
    ),
    "qwen3_moe": (EXPERTS | {"norm_topk_prob": True, "head_dim": SIZE}, "qwen3moe", EXPERT_KEYS),
    "olmoe": (
        {"num_experts": 5, "num_experts_per_tok": 3, "num_key_value_heads": HEADS},
        "olmoe",
        EXPERT_KEYS | {"expert_feed_forward_length": 96, "attention.head_count_kv": HEADS},
    ),
}


def config_of(kind, **changes):
    fields, changes = copy.deepcopy((FAMILY_CASES[kind][0], changes))  # transformers modifies its argument
    if kind in TEXTS:
        return {"model_type": kind, "text_config": SIZES | TEXTS[kind] | changes}
    config = SIZES | {"model_type": kind} | fields | changes
    return {name: value for name, value in config.items() if kind not in LAYER_NORMS or name != "rms_norm_eps"}


def write_tokenizer(folder):
    """263 rows or more: bytes, two merges, two special tokens and one that is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)} | {"ab": 256, "abc": 257}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 258)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_model(folder, config):
    """A folder with random bfloat16 weights; returns {path: array}."""
    rng = np.random.default_rng(0)
    rows = family_for(config).specs(config)
    arrays = {
        row.path: (0.15 * rng.standard_normal(row.shape) + ("norm" in row.path)).astype(ml_dtypes.bfloat16)
        for row in rows
    }
    write_checkpoint(folder, stored(config, arrays).items(), config)
    write_tokenizer(folder)
    return arrays


def stored(config, arrays):
    """A folder's arrays by name, from those of the tree."""
    found = {}
    for tensor in family_for(config).tensors(config).values():
        whole = arrays[tensor.weights[0].path]
        found[tensor.name] = whole if tensor.expert is None else whole[tensor.expert]
    return found
