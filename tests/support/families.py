"""One tiny model a family, with every field of its config off transformers' default."""

from tests.support import tiny

_SIZES = {
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
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 6.0,
    "beta_slow": 1.5,
    "truncate": False,
}
_LLAMA3 = {**tiny.ROPE, "rope_theta": 300.0}
FULL, SLIDING = "full_attention", "sliding_attention"


def _family(name, **fields):
    return {**_SIZES, "model_type": name, **fields}


def _without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_GEMMA = {
    "head_dim": 10,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 6,
    "query_pre_attn_scalar": 23,
    "hidden_activation": "silu",
    "final_logit_softcapping": 4.0,
}
_PERIOD_OF_THREE = [SLIDING, FULL, SLIDING] * 2 + [SLIDING]

#: model_type -> a config.json.
CONFIGS = {
    "qwen2": _family(
        "qwen2",
        **_WINDOWS,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL] * 2,
        rope_parameters=_YARN,
    ),
    "qwen3": _family(
        "qwen3",
        **_WINDOWS,
        head_dim=10,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING] * 2,
        rope_parameters=_YARN,
    ),
    "mistral": _family("mistral", head_dim=10, hidden_act="gelu", tie_word_embeddings=True, sliding_window=6),
    "ministral": _family(
        "ministral",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=6,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL] * 2,
    ),
    "gemma": _family("gemma", head_dim=10, tie_word_embeddings=False, attention_bias=True, hidden_act="silu"),
    "gemma2": _family(
        "gemma2",
        **_GEMMA,
        attn_logit_softcapping=2.0,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING] * 2,
        rope_parameters=_LLAMA3,
    ),
    "gemma3_text": _family(
        "gemma3_text",
        **_GEMMA,
        num_hidden_layers=len(_PERIOD_OF_THREE),
        layer_types=_PERIOD_OF_THREE,
        rope_parameters={
            FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 1.5},
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "phi3": _family(
        "phi3",
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        sliding_window=30,
        original_max_position_embeddings=20,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.2, 1.5],
            "long_factor": [1.5, 3.0, 6.0],
        },
    ),
    "granite": _family(
        "granite",
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        attention_multiplier=0.2,
        logits_scaling=0.8,
        max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 300.0, "factor": 6.0},
    ),
    "olmo2": _family("olmo2", hidden_act="gelu", tie_word_embeddings=True, attention_bias=True),
    "smollm3": _family(
        "smollm3",
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        num_hidden_layers=4,
        no_rope_layers=[1, 0] * 2,
        no_rope_layer_interval=3,
        layer_types=[SLIDING, FULL] * 2,
    ),
    "cohere": _without(
        _family(
            "cohere",
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=False,
            attention_bias=True,
            use_qk_norm=True,
            logit_scale=1.7,
            layer_norm_eps=3e-2,
        ),
        "rms_norm_eps",
    ),
}

CONFIGS |= {
    "olmo3": _family(
        "olmo3",
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=4,
        sliding_window=6,
        layer_types=[FULL, SLIDING] * 2,
        rope_parameters={FULL: _without(_YARN, "truncate"), SLIDING: {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "exaone4": _family(
        "exaone4",
        hidden_act="gelu",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        sliding_window=6,
        sliding_window_pattern=2,
        layer_types=[FULL, SLIDING] * 2,
    ),
    "ministral3": _family(
        "ministral3",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=6,
        rope_parameters={**_YARN, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.7},
    ),
    "arcee": _family(
        "arcee",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "hunyuan_v1_dense": _family(
        "hunyuan_v1_dense",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "seed_oss": _family(
        "seed_oss",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        attention_dropout=0.0,
        residual_dropout=0.0,
    ),
}
_EXPERTS = {"num_experts_per_tok": 3, "norm_topk_prob": True, "router_aux_loss_coef": 0.02}
#: Likewise of the families with mixtures of experts.
MIXTURES = {
    "mixtral": _family(
        "mixtral",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.02,
    ),
    "qwen2_moe": _family(
        "qwen2_moe",
        **_EXPERTS,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=3,
        hidden_act="gelu",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING] * 2,
        qkv_bias=False,
        num_experts=4,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": _family(
        "qwen3_moe",
        **_EXPERTS,
        head_dim=10,
        use_sliding_window=True,
        sliding_window=5,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=4,
        num_experts=4,
        moe_intermediate_size=12,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        rope_parameters=_YARN,
    ),
    "olmoe": _family(
        "olmoe",
        **_EXPERTS,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        num_experts=4,
    ),
    "gpt_oss": _family(
        "gpt_oss",
        head_dim=10,
        tie_word_embeddings=True,
        attention_bias=False,
        num_hidden_layers=4,
        sliding_window=6,
        layer_types=[FULL, SLIDING] * 2,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.02,
        swiglu_limit=0.4,
        swiglu_alpha=1.3,
    ),
    "glm4_moe": _family(
        "glm4_moe",
        head_dim=20,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        use_qk_norm=True,
        num_hidden_layers=4,
        first_k_dense_replace=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 300.0,
            "factor": 1.5,
            "partial_rotary_factor": 0.6,
        },
    ),
}
#: Llama has a table of its own in `tiny`; here the sizes of the others.
LLAMA = _family("llama", head_dim=10, tie_word_embeddings=True)

#: A text model beside a vision tower.
NESTED = {
    "model_type": "gemma3",
    "dtype": "float32",
    "text_config": CONFIGS["gemma3_text"] | {"final_logit_softcapping": None},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 95,
    "tie_word_embeddings": False,
}

#: Other spellings in a family's config.json, and the alternatives to the choices in `CONFIGS`.
VARIANTS = {
    **{name: (name, config) for name, config in CONFIGS.items()},
    "qwen2, windows by number": ("qwen2", _without(CONFIGS["qwen2"], "layer_types")),
    "qwen2, no windows": ("qwen2", CONFIGS["qwen2"] | {"use_sliding_window": False, "layer_types": [FULL] * 4}),
    "qwen3, windows by number": ("qwen3", _without(CONFIGS["qwen3"], "layer_types")),
    "mistral, no window": ("mistral", CONFIGS["mistral"] | {"sliding_window": None}),
    "ministral, windows everywhere": ("ministral", _without(CONFIGS["ministral"], "layer_types")),
    "gemma, tied": ("gemma", CONFIGS["gemma"] | {"tie_word_embeddings": True, "attention_bias": False}),
    "gemma, gelu": ("gemma", CONFIGS["gemma"] | {"hidden_act": "gelu"}),
    "gemma2, windows by turns": ("gemma2", _without(CONFIGS["gemma2"], "layer_types")),
    "gemma2, tied": ("gemma2", CONFIGS["gemma2"] | {"tie_word_embeddings": True, "final_logit_softcapping": None}),
    "gemma3_text, old spelling": (
        "gemma3_text",
        _without(CONFIGS["gemma3_text"], "layer_types", "rope_parameters")
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
        _without(CONFIGS["phi3"], "rope_parameters")
        | {
            "rope_theta": 300.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.5, 3.0, 6.0, 9.0],
            },
        },
    ),
    "smollm3, by interval": ("smollm3", _without(CONFIGS["smollm3"], "layer_types", "no_rope_layers")),
    "smollm3, no windows": (
        "smollm3",
        _without(CONFIGS["smollm3"], "layer_types") | {"use_sliding_window": False, "tie_word_embeddings": True},
    ),
    "hunyuan_v1_dense, alpha": (
        "hunyuan_v1_dense",
        CONFIGS["hunyuan_v1_dense"]
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 1.0, "alpha": 5.0}},
    ),
    "hunyuan_v1_dense, as published": (
        "hunyuan_v1_dense",
        _without(CONFIGS["hunyuan_v1_dense"], "rope_parameters")
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
    "arcee, relu2": ("arcee", CONFIGS["arcee"] | {"hidden_act": "relu2", "tie_word_embeddings": False}),
    "cohere, no norm of queries": ("cohere", CONFIGS["cohere"] | {"use_qk_norm": False, "tie_word_embeddings": True}),
}

#: Likewise of `MIXTURES`.
MIXTURE_VARIANTS = {
    **{name: (name, config) for name, config in MIXTURES.items()},
    "qwen2_moe, mixtures everywhere": (
        "qwen2_moe",
        _without(MIXTURES["qwen2_moe"], "layer_types", "decoder_sparse_step", "mlp_only_layers") | {"qkv_bias": True},
    ),
    "qwen3_moe, mixtures everywhere": (
        "qwen3_moe",
        _without(MIXTURES["qwen3_moe"], "decoder_sparse_step", "mlp_only_layers", "use_sliding_window")
        | {"norm_topk_prob": False, "max_window_layers": 4},
    ),
    "gpt_oss, as published": (
        "gpt_oss",
        _without(MIXTURES["gpt_oss"], "layer_types", "rope_parameters")
        | {
            "attention_bias": True,
            "experts_per_token": 3,
            "initial_context_length": 40,
            "rope_theta": 300.0,
            "rope_scaling": _YARN,
        },
    ),
    "glm4_moe, groups together": (
        "glm4_moe",
        _without(MIXTURES["glm4_moe"], "rope_parameters", "head_dim")
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
