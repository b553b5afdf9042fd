"""Sizes that the tiny models of all families share."""

from tests.support import tiny

SIZES = {
    "dtype": "float32",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.15,
    "use_cache": False,
    "bos_token_id": 7,
    "eos_token_id": 8,
    "pad_token_id": 96,
    "rms_norm_eps": 3e-2,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 6.0,
    "beta_slow": 1.5,
    "truncate": False,
}
LLAMA3 = {**tiny.ROPE, "rope_theta": 300.0}
FULL, SLIDING = "full_attention", "sliding_attention"


def family(name, **fields):
    return {**SIZES, "model_type": name, **fields}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


LINEAR = "linear_attention"
DELTA = {
    "head_dim": 24,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, FULL] * 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        **{"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5, "partial_rotary_factor": 0.5},
        **{"mrope_section": [3, 2, 1], "mrope_interleaved": True},
    },
}
