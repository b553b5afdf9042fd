"""Other spellings of the families' configs, and the alternatives to their choices."""

from tests.support.families import CONFIGS, LLAMA
from tests.support.family_mixtures import MIXTURES
from tests.support.family_sizes import FULL, SLIDING, YARN, without

#: Other spellings in a family's config.json, and the alternatives to the choices in `CONFIGS`.
VARIANTS = {
    **{name: (name, config) for name, config in CONFIGS.items()},
    "qwen2, windows by number": ("qwen2", without(CONFIGS["qwen2"], "layer_types")),
    "qwen2, no windows": ("qwen2", CONFIGS["qwen2"] | {"use_sliding_window": False, "layer_types": [FULL] * 4}),
    "qwen3, windows by number": ("qwen3", without(CONFIGS["qwen3"], "layer_types")),
    "mistral, no window": ("mistral", CONFIGS["mistral"] | {"sliding_window": None}),
    "ministral, windows everywhere": ("ministral", without(CONFIGS["ministral"], "layer_types")),
    "gemma, tied": ("gemma", CONFIGS["gemma"] | {"tie_word_embeddings": True, "attention_bias": False}),
    "gemma, gelu": ("gemma", CONFIGS["gemma"] | {"hidden_act": "gelu"}),
    "gemma2, windows by turns": ("gemma2", without(CONFIGS["gemma2"], "layer_types")),
    "gemma2, tied": ("gemma2", CONFIGS["gemma2"] | {"tie_word_embeddings": True, "final_logit_softcapping": None}),
    "gemma3_text, old spelling": (
        "gemma3_text",
        without(CONFIGS["gemma3_text"], "layer_types", "rope_parameters")
        | {
            "sliding_window_pattern": 3,
            "rope_theta": 900.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "linear", "factor": 1.5},
        },
    ),
    "phi3, every pair turns": (
        "phi3",
        CONFIGS["phi3"] | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "sliding_window": None},
    ),
    "phi3, old spelling": (
        "phi3",
        without(CONFIGS["phi3"], "rope_parameters")
        | {
            "rope_theta": 300.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.5, 3.0, 6.0, 9.0],
            },
        },
    ),
    "smollm3, by interval": ("smollm3", without(CONFIGS["smollm3"], "layer_types", "no_rope_layers")),
    "smollm3, no windows": (
        "smollm3",
        without(CONFIGS["smollm3"], "layer_types") | {"use_sliding_window": False, "tie_word_embeddings": True},
    ),
    "hunyuan_v1_dense, alpha": (
        "hunyuan_v1_dense",
        CONFIGS["hunyuan_v1_dense"]
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 1.0, "alpha": 5.0}},
    ),
    "hunyuan_v1_dense, as published": (
        "hunyuan_v1_dense",
        without(CONFIGS["hunyuan_v1_dense"], "rope_parameters")
        | {
            "rope_theta": 300.0,
            "rope_scaling": {
                "type": "dynamic",
                "alpha": 5.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "exaone4, no windows": (
        "exaone4",
        CONFIGS["exaone4"] | {"sliding_window": None, "layer_types": [FULL] * 4, "sliding_window_pattern": None},
    ),
    "ministral3, unscaled": (
        "ministral3",
        CONFIGS["ministral3"]
        | {
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 300.0},
                **{"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.7},
            },
        },
    ),
    "starcoder2, biases": ("starcoder2", CONFIGS["starcoder2"] | {"use_bias": True, "tie_word_embeddings": True}),
    "arcee, relu2": ("arcee", CONFIGS["arcee"] | {"hidden_act": "relu2", "tie_word_embeddings": False}),
    "qwen3_5_text, as published": (
        "qwen3_5_text",
        without(CONFIGS["qwen3_5_text"], "layer_types", "attention_bias")
        | {
            **{"full_attention_interval": 2, "hidden_act": "silu", "linear_num_value_heads": 2},
            **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32"},
            **{"attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": []},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 300.0, "mrope_section": [1, 1, 1]},
                **{"mrope_interleaved": True, "partial_rotary_factor": 0.25},
            },
        },
    ),
    "olmo_hybrid, as published": (
        "olmo_hybrid",
        without(CONFIGS["olmo_hybrid"], *(name for name in CONFIGS["olmo_hybrid"] if name.startswith("linear_")))
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "attention_bias": False},
    ),
    "cohere, no norm of queries": ("cohere", CONFIGS["cohere"] | {"use_qk_norm": False, "tie_word_embeddings": True}),
}

#: The same of `MIXTURES`.
MIXTURE_VARIANTS = {
    **{name: (name, config) for name, config in MIXTURES.items()},
    "qwen2_moe, mixtures everywhere": (
        "qwen2_moe",
        without(MIXTURES["qwen2_moe"], "layer_types", "decoder_sparse_step", "mlp_only_layers") | {"qkv_bias": True},
    ),
    "qwen3_moe, mixtures everywhere": (
        "qwen3_moe",
        without(MIXTURES["qwen3_moe"], "decoder_sparse_step", "mlp_only_layers", "use_sliding_window")
        | {"norm_topk_prob": False, "max_window_layers": 4},
    ),
    "qwen3_next, mixtures everywhere": (
        "qwen3_next",
        without(MIXTURES["qwen3_next"], "decoder_sparse_step", "mlp_only_layers", "rope_parameters")
        | {"norm_topk_prob": True, "rope_theta": 300.0},
    ),
    "gpt_oss, as published": (
        "gpt_oss",
        without(MIXTURES["gpt_oss"], "layer_types", "rope_parameters")
        | {
            "attention_bias": True,
            "experts_per_token": 3,
            "initial_context_length": 40,
            "rope_theta": 300.0,
            "rope_scaling": YARN,
        },
    ),
    "glm4_moe, groups together": (
        "glm4_moe",
        without(MIXTURES["glm4_moe"], "rope_parameters", "head_dim")
        | {
            "topk_group": 4,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "first_k_dense_replace": 0,
            **{"num_attention_heads": 3, "num_key_value_heads": 1},  # 10 features, of which 5 turn
            "rope_theta": 300.0,
            "num_nextn_predict_layers": 1,
        },
    ),
    "deepseek_v3, as published": (
        "deepseek_v3",
        without(MIXTURES["deepseek_v3"], "rope_parameters", "rope_interleave", "attention_bias")
        | {
            "rope_theta": 300.0,
            "rope_scaling": {
                **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
                **{"beta_fast": 6, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
            **{"tie_word_embeddings": False, "norm_topk_prob": True, "num_nextn_predict_layers": 1},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1},
            **{"aux_loss_alpha": 0.001, "seq_aux": True},
        },
    ),
    "glm4_moe_lite, queries without a latent": (
        "glm4_moe_lite",
        without(MIXTURES["glm4_moe_lite"], "rope_parameters", "mlp_layer_types")
        | {
            **{"q_lora_rank": None, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "rope_interleave": True},
            **{"rope_theta": 300.0, "rope_scaling": None, "partial_rotary_factor": 1.0},
        },
    ),
}

#: Fields without effect, with the value of some published config.json.
IDLE = {
    "model_max_length": 77,
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4"},
    "temperature": 0.7,
    "top_k": 5,
    "do_sample": True,
    "use_flash_attn": True,
    "pruned_heads": {},
    "num_labels": 3,
}
#: Further inputs of transformers: other names of activations, redundant fields, fields without effect.
SPELLINGS = {
    "llama": (
        "llama",
        LLAMA
        | IDLE
        | {
            "hidden_act": "gelu_accurate",
            "attention_dropout": 0.3,
            "layer_types": [FULL] * 3,
            "original_max_position_embeddings": 33,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 33,
            },
        },
    ),
    "mistral, layer_types": (
        "mistral",
        CONFIGS["mistral"]
        | {
            "hidden_act": "gelu_fast",
            "layer_types": [SLIDING] * 3,
            "rope_parameters": CONFIGS["mistral"]["rope_parameters"] | {"original_max_position_embeddings": 33},
        },
    ),
    "gemma, gelu_python": ("gemma", CONFIGS["gemma"] | {"hidden_act": "gelu_python", "partial_rotary_factor": 1.0}),
    "gemma3_text, flat": (
        "gemma3_text",
        CONFIGS["gemma3_text"]
        | {
            "hidden_activation": "gelu_new",
            "rope_theta": 900.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
            "rope_local_base_freq": 50.0,
        },
    ),
}
